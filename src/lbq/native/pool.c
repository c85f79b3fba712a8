/* A small pool of POSIX threads, the CPU's features, and the identity of the sources. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "conv_amx.h"
#include "native.h"
#if defined(LBQ_X86)
#include <cpuid.h>
#endif

#ifndef LBQ_SOURCE_HASH
#define LBQ_SOURCE_HASH "unknown"
#endif
#define MAX_WORKERS 63
#define LINGER 200000 /* nanoseconds for which a thread looks for what it waits for before it sleeps */

const char *lbq_source_hash(void) { return LBQ_SOURCE_HASH; }

#if defined(LBQ_X86)
static int bit(uint32_t word, int at) { return word >> at & 1; }

/* Asked of the CPU itself: the compilers' own __builtin_cpu_supports needs a library that zig does not link. */
static int32_t x86_sets(void) {
    uint32_t a, b, c, d, saved, high, more;
    if (!__get_cpuid(0x80000001, &a, &b, &more, &d)) return 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27) || !bit(c, 28) || !bit(c, 23)) return 0; /* OSXSAVE, AVX, POPCNT */
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* which registers the system saves */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (saved & 0x06) != 0x06) return 0;
    if (!bit(b, 5) || !bit(b, 3) || !bit(b, 8) || !bit(more, 5)) return 0; /* AVX2, BMI, BMI2, LZCNT */
    int32_t sets = LBQ_HAS_AVX2;
    if ((saved & 0xe6) != 0xe6 || !bit(b, 16) || !bit(b, 17) || !bit(b, 30) || !bit(b, 31)) return sets; /* F DQ BW VL */
    sets |= LBQ_HAS_AVX512;
    if (bit(c, 11)) sets |= LBQ_HAS_VNNI;
    if (bit(c, 1) && bit(c, 6)) sets |= LBQ_HAS_COMPRESS; /* VBMI, VBMI2 */
    if (lbq_amx_available()) sets |= LBQ_HAS_AMX;
    return sets;
}
#endif

static int32_t look(void) {
    int32_t sets = 1 << LBQ_PORTABLE;
#if defined(LBQ_X86)
    sets |= x86_sets();
#elif defined(LBQ_ARM)
    sets |= LBQ_HAS_NEON; /* part of the architecture */
#if defined(__APPLE__)
    sets |= LBQ_HAS_DOTPROD; /* every Apple CPU of this architecture */
#elif defined(__linux__)
    if (getauxval(AT_HWCAP) & (1UL << 20)) sets |= LBQ_HAS_DOTPROD; /* HWCAP_ASIMDDP */
#endif
#endif
    return sets;
}

int32_t lbq_features(void) {
    static atomic_int known; /* looking takes long in a virtual machine */
    int32_t found = atomic_load_explicit(&known, memory_order_relaxed);
    if (!found) atomic_store_explicit(&known, found = look(), memory_order_relaxed);
    return found;
}

/* One job at a time; a caller that finds the pool busy runs its units alone, with the same result. Every thread has a share
 * of the units, neighbours, and helps the others when it is done: of one layer after the other it then takes the same part,
 * which is in its cache. */
static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t wake, done;
    int workers, wanted;
    atomic_int running;
    atomic_uint_fast64_t job;
    lbq_work work;
    void *context;
    int64_t units;
    int threads;
    struct {
        _Alignas(64) atomic_int_fast64_t next;
    } share[MAX_WORKERS + 1];
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void drain(lbq_work work, void *context, int64_t units, int threads, int me) {
    for (int i = 0; i < threads; i++) {
        int whose = (me + i) % threads;
        int64_t unit, end = units * (whose + 1) / threads;
        while ((unit = atomic_fetch_add(&pool.share[whose].next, 1)) < end) work(context, unit);
    }
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* One layer's job comes right after another's, and ends at nearly the same time everywhere: waking a sleeper takes longer. */
#define LINGER_WHILE(condition)                                                 \
    for (int64_t end = now() + LINGER; (condition) && now() < end;)             \
        for (int i = 0; i < 64 && (condition); i++) relax();

static void relax(void) {
#if defined(LBQ_X86)
    __builtin_ia32_pause();
#elif defined(LBQ_ARM)
    __asm__ volatile("yield");
#endif
}

static void *worker(void *unused) {
    (void)unused;
    uint64_t seen = 0;
    for (;;) {
        LINGER_WHILE(atomic_load(&pool.job) == seen)
        pthread_mutex_lock(&pool.lock);
        while (pool.job == seen || pool.wanted == 0) {
            seen = pool.job;
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = pool.job;
        int me = pool.wanted--;
        pool.running++;
        lbq_work work = pool.work;
        void *context = pool.context;
        int64_t units = pool.units;
        int threads = pool.threads;
        pthread_mutex_unlock(&pool.lock);
        drain(work, context, units, threads, me);
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

#if !defined(_WIN32) /* which does not fork */
static void after_fork(void) {
    pthread_mutex_t free_mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t free_cond = PTHREAD_COND_INITIALIZER;
    pool.busy = pool.lock = free_mutex;
    pool.wake = pool.done = free_cond;
    pool.workers = pool.wanted = 0;
    atomic_store(&pool.running, 0);
}
#endif

static void grow(int workers) { /* with the lock held */
#if !defined(_WIN32)
    static atomic_flag registered = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&registered)) pthread_atfork(NULL, NULL, after_fork);
#endif
    for (; pool.workers < workers; pool.workers++) {
        pthread_attr_t detached;
        pthread_t thread;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &detached, worker, NULL);
        pthread_attr_destroy(&detached);
        if (failed) return; /* fewer threads, same result */
    }
}

void lbq_parallel(int threads, int64_t units, lbq_work work, void *context) {
    if (threads > units) threads = (int)units;
    if (threads > MAX_WORKERS + 1) threads = MAX_WORKERS + 1;
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy) != 0) {
        for (int64_t unit = 0; unit < units; unit++) work(context, unit);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    grow(threads - 1);
    pool.work = work, pool.context = context, pool.units = units, pool.threads = threads;
    for (int i = 0; i < threads; i++) atomic_store(&pool.share[i].next, units * i / threads);
    pool.job++;
    pool.wanted = threads - 1;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    drain(work, context, units, threads, 0);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0; /* who has not started by now has nothing to do */
    pthread_mutex_unlock(&pool.lock);
    LINGER_WHILE(atomic_load(&pool.running))
    pthread_mutex_lock(&pool.lock);
    while (pool.running) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
}
