"""A dense kernel that passes over blocks of four channels without a level: is it worth it?

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/block_skip.py MODEL CIFAR10_FOLDER [--turns 9]

Every 3x3 convolution of stride 1, on the levels of two test images, on one thread. Compared: the package's dense kernel, bit
planes and pairs, and three that are compiled here: dense by `maddubs` (8-bit products, six pixels share each load of
weights), the same on the blocks that hold a level (one pixel at a time), and that with channels sorted by activity. All give
the same currents. Ratios are to the package's dense kernel, the middle of turns, in processor time. Needs AVX-512 and cc.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine_kernels import channels_last
from numpy.typing import NDArray

from lbq import engine
from lbq.data.cifar import load_cifar10
from lbq.engine.convolution import PackedConv
from lbq.engine.pairs import chosen_lists, rows_by_pair
from lbq.engine.tape import aligned, perform

C = r"""
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)
/* levels [h + 2][w + 2][in], padded; weights [outs / 64][9][in / 4][64][4]; out [h][w][outs]. Products of `most` blocks fit
   sums of 16 bits, which then go into sums of 32 bits. */
#define ARGUMENTS const uint8_t *levels, const int8_t *weights, int64_t h, int64_t w, int64_t in, int64_t outs, \
                  int64_t most, int32_t *out
static __m512i four(const uint8_t *p) { int32_t x; memcpy(&x, p, 4); return _mm512_set1_epi32(x); }
static __m512i plus(__m512i sum, __m512i x, const void *w) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(x, _mm512_loadu_si512(w)));
}
static __m512i wide(__m512i sum, __m512i narrow) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(narrow, _mm512_set1_epi16(1)));
}
enum { TILE = 6 };
void dense(ARGUMENTS) {
    int64_t quads = in / 4, line = (w + 2) * in;
    for (int64_t b = 0; b < outs / 64; b++)
        for (int64_t p = 0; p < h * w; p += TILE) {
            const uint8_t *at[TILE];
            const int8_t *row = weights + b * 9 * quads * 256;
            int64_t to[TILE], left = most;
            __m512i sum[TILE][4], narrow[TILE][4];
            EACH(i, TILE) to[i] = p + i < h * w ? p + i : h * w - 1, at[i] = levels + to[i] / w * line + to[i] % w * in;
            EACH(i, TILE) EACH(j, 4) sum[i][j] = narrow[i][j] = _mm512_setzero_si512();
            for (int ky = 0; ky < 3; ky++)
                for (int64_t q = 0; q < 3 * quads; q++, row += 256) {
                    EACH(i, TILE) {
                        __m512i x = four(at[i] + ky * line + 4 * q);
                        EACH(j, 4) narrow[i][j] = plus(narrow[i][j], x, row + 64 * j);
                    }
                    if (--left) continue;
                    EACH(i, TILE) EACH(j, 4) sum[i][j] = wide(sum[i][j], narrow[i][j]), narrow[i][j] = _mm512_setzero_si512();
                    left = most;
                }
            EACH(i, TILE) EACH(j, 4)
                _mm512_storeu_si512(out + to[i] * outs + b * 64 + 16 * j, wide(sum[i][j], narrow[i][j]));
        }
}
/* ids: of each padded pixel the blocks that hold a level, from ends[pixel] on; 128 outputs at a time */
void skip(ARGUMENTS, uint16_t *ids, int32_t *ends) {
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t quads = in / 4, columns = w + 2, next = 9 * quads * 256;
    int32_t used = 0;
    for (int64_t p = 0; p < (h + 2) * columns; p++) {
        ends[p] = used;
        for (int64_t q = 0; q < quads; q += 16) {
            __m512i x = _mm512_loadu_si512(levels + p * in + 4 * q), id = _mm512_add_epi32(numbers, _mm512_set1_epi32((int)q));
            __mmask16 held = _mm512_test_epi32_mask(x, x);
            __m512i packed = _mm512_maskz_compress_epi32(held, id);
            _mm256_storeu_si256((__m256i *)(ids + used), _mm512_cvtepi32_epi16(packed));
            used += __builtin_popcount(held);
        }
    }
    ends[(h + 2) * columns] = used;
    for (int64_t b = 0; b < outs / 64; b += 2)
        for (int64_t pixel = 0; pixel < h * w; pixel++) {
            __m512i sum[8], narrow[8];
            int64_t left = most, y = pixel / w, x = pixel % w;
            EACH(j, 8) sum[j] = narrow[j] = _mm512_setzero_si512();
            for (int t = 0; t < 9; t++) {
                int64_t p = (y + t / 3) * columns + x + t % 3;
                const int8_t *rows = weights + (b * 9 + t) * quads * 256;
                for (const uint16_t *id = ids + ends[p], *end = ids + ends[p + 1], *stop; id < end;) {
                    stop = end - id < left ? end : id + left, left -= stop - id;
                    for (; id < stop; id++) {
                        __m512i v = four(levels + p * in + 4 * *id);
                        EACH(j, 8) narrow[j] = plus(narrow[j], v, rows + *id * 256 + j / 4 * next + j % 4 * 64);
                    }
                    if (left) continue;
                    EACH(j, 8) sum[j] = wide(sum[j], narrow[j]), narrow[j] = _mm512_setzero_si512();
                    left = most;
                }
            }
            EACH(j, 8) _mm512_storeu_si512(out + pixel * outs + b * 64 + 16 * j, wide(sum[j], narrow[j]));
        }
}
"""
NAMES = ("dense", "bitplane", "pairs", "maddubs", "blocks", "sorted")


def kernel(function: Any, levels: NDArray[Any], weights: NDArray[Any], largest: int, lists: bool) -> Callable[[], Any]:
    """A run of one of the functions above, padding included."""
    (batch, height, width, inputs), outputs = levels.shape, len(weights)
    shape = (height + 2, width + 2)
    padded, out = np.zeros((batch, *shape, inputs), np.uint8), np.zeros((batch, height, width, outputs), np.int32)
    quads = aligned((outputs // 64, 9, inputs // 4, 64, 4), np.int8)
    quads[...] = weights.reshape(outputs // 64, 64, inputs // 4, 4, 9).transpose(0, 4, 2, 1, 3)
    sizes = (height, width, inputs, outputs, 32767 // (2 * largest * int(np.abs(weights).max())))
    room = (np.zeros(shape[0] * shape[1] * inputs // 4 + 64, np.uint16), np.zeros(shape[0] * shape[1] + 1, np.int32))

    def run() -> NDArray[np.int32]:
        padded[:, 1:-1, 1:-1] = levels
        for image, to in zip(padded, out, strict=True):
            arrays = (image, quads, *sizes, to, *(room if lists else ()))
            function(*(ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data) for a in arrays))
        return out

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    net, total = engine.load(options.model), dict.fromkeys(NAMES, 0.0)
    traced = net.run(load_cifar10(options.data).test.images[:2], "bitplane", trace=True).levels or {}
    print(f"{'':16}{'active %':>9}{'blocks %':>9}{'sorted %':>9}" + "".join(f"{name:>9}" for name in NAMES[1:]))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/blocks.so"
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
        subprocess.run(command, input=C, text=True, check=True)
        lib = ctypes.CDLL(path)
        for s in (s for layer in net.network.layers for s in layer.convs):
            if s.source not in traced or s.pools or s.stride != (1, 1) or s.weight.shape[2] != 3:
                continue
            levels, largest, steps = channels_last(traced[s.source]), net.network.largest(s), net.network.timesteps
            order = np.argsort(-(levels > 0).mean((0, 1, 2)), kind="stable")
            levels_sorted, weights_sorted = levels[..., order], s.weight[:, order]
            lists = chosen_lists(rows_by_pair(levels, steps, 9), largest)
            conv, runs = PackedConv(s.weight, s.stride, s.padding), {}
            for method in NAMES[:3]:
                step = conv.step(levels, method, largest=largest, timesteps=steps, lists=lists)
                runs[method] = lambda step=step: (perform(step, 1), step.out)[1]
            runs["maddubs"] = kernel(lib.dense, levels, s.weight, largest, False)
            runs["blocks"] = kernel(lib.skip, levels, s.weight, largest, True)
            runs["sorted"] = kernel(lib.skip, levels_sorted, weights_sorted, largest, True)
            assert all(np.array_equal(run(), runs["dense"]()) for run in runs.values())
            times: dict[str, list[float]] = {name: [] for name in NAMES}
            for _ in range(options.turns):
                for name, run in runs.items():
                    start = time.thread_time()
                    run()
                    times[name].append(time.thread_time() - start)
            shares = [(levels > 0).mean(), *(x.reshape(-1, 4).any(1).mean() for x in (levels, levels_sorted))]
            ratios = [float(np.median(np.divide(times["dense"], times[name]))) for name in NAMES[1:]]
            print(f"{s.name:16}" + "".join(f"{100 * x:9.1f}" for x in shares) + "".join(f"{x:9.2f}" for x in ratios))
            total = {name: total[name] + float(np.median(times[name])) for name in NAMES}
    print(f"{'all':43}" + "".join(f"{total['dense'] / total[name]:9.2f}" for name in NAMES[1:]))


if __name__ == "__main__":
    main()
