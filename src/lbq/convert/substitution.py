"""Rewrite an ANN's torch.fx graph: a neuron replaces each ReLU, and time is folded into the batch."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from lbq.deploy.lowering.faithful import own_method
from lbq.deploy.lowering.trace import Follower, traced
from lbq.errors import GraphError
from lbq.models import fold_time, unfold_time
from lbq.models.resnet import MakeNeuron
from lbq.neuron import ReLU, SpikingNeuron

RECTIFIERS = (nn.ReLU, nn.ReLU6, ReLU)
RECTIFIER_FUNCTIONS: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((torch.relu, torch.relu_, nn.functional.relu, "relu", "relu_"), nn.ReLU),
    nn.functional.relu6: nn.ReLU6,
}
IN_PLACE_FUNCTIONS = (torch.relu_, "relu_")
SMOOTH = {  # near enough to a ReLU that a little training makes good
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "elu": nn.ELU,
    "celu": nn.CELU,
    "leakyrelu": nn.LeakyReLU,
    "softplus": nn.Softplus,
}
OTHER_ACTIVATIONS = {"celu", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_softmax",
          "logsigmoid", "mish", "prelu", "rrelu", "selu", "sigmoid", "silu", "softmax", "softmin", "softplus", "softsign",
          "tanh"}  # fmt: skip


def with_relus(ann: nn.Module) -> nn.Module:
    """A copy of a network whose GELU, SiLU, Hardswish, Mish, ELU, CELU, LeakyReLU and Softplus modules are ReLUs.

    It computes something else: train it on for a few epochs, with a small learning rate, before `convert`.
    """
    net = copy.deepcopy(ann)
    replaced = [name for name, module in net.named_modules() if type(module) in SMOOTH.values()]
    for name in replaced:
        if not name:
            return nn.ReLU()
        net.set_submodule(name, nn.ReLU())
    if not replaced:
        kinds = ", ".join(kind.__name__ for kind in SMOOTH.values())
        raise GraphError(f"{type(ann).__name__} has no module of {kinds}: write functions such as F.gelu(x) as modules")
    return net


def separate(net: nn.Module, dimensions: int) -> fx.GraphModule:
    """The traced network. Every place that rectifies gets its own module, none of which works in place."""
    plain = fx.GraphModule(net, traced(net, Follower(dimensions)))
    modules = dict(plain.named_modules())
    names = {name for name, module in modules.items() if not isinstance(module, RECTIFIERS)}
    names |= {name for name, _ in chain(net.named_parameters(), net.named_buffers())}
    replaced = 0
    for node in list(plain.graph.nodes):
        node.type = None  # annotations that are strings cannot be saved
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if node.target in (fold_time, unfold_time) or isinstance(module, SpikingNeuron):
            raise GraphError(
                f"{type(net).__name__} knows time already: for networks of lbq.models make the spiking one with the same "
                "weights, and lbq.convert.calibrate it"
            )
        kind = _rectifier(node, module)
        if kind is None:
            continue
        stem = node.name if module is None else str(node.target)
        name = next(n for n in chain([stem], (f"{stem}_{i}" for i in count(2))) if n not in names)
        names.add(name)
        replaced += 1
        x = node.all_input_nodes[0]
        flagged = getattr(module, "inplace", False) or True in (*node.args, *node.kwargs.values())
        in_place = flagged or node.target in IN_PLACE_FUNCTIONS
        later = [user for user in x.users if node < user] if in_place else []  # they see x rectified
        plain.add_submodule(name, kind())
        with plain.graph.inserting_before(node):
            new = plain.graph.call_module(name, (x,))
        node.replace_all_uses_with(new)
        for user in later:
            user.replace_input_with(x, new)
        plain.graph.erase_node(node)
    if not replaced:
        raise GraphError(_without_relu(net, modules))
    plain.recompile()
    return plain


def _without_relu(net: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    """Why no ReLU was seen: there is none, or it is inside a layer of PyTorch's that tracing does not enter."""
    for name, module in modules.items():
        inside = any(isinstance(m, RECTIFIERS) for m in module.modules())
        own = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        if own and (inside or module.activation is nn.functional.relu):
            return (
                f"layer {name!r}: torch.fx does not look into {type(module).__name__}, where the ReLU stands: write it out of "
                "nn.MultiheadAttention, nn.LayerNorm, nn.Linear and nn.ReLU in a module of your own"
            )
    return f"{type(net).__name__} has no ReLU, in whose place a neuron could stand"


def _rectifier(node: fx.Node, module: nn.Module | None) -> type[nn.Module] | None:
    """The kind of rectifier that a node is, or None. Other activations are refused."""
    if module is None:
        if node.op not in ("call_function", "call_method"):  # a parameter may be called relu
            return None
        name = str(getattr(node.target, "__name__", node.target)).rstrip("_")  # in place or not
        where = f"{node.name} in the network's forward"
        if name not in OTHER_ACTIVATIONS:
            return RECTIFIER_FUNCTIONS.get(node.target)
    else:
        name, where = type(module).__name__, f"layer {node.target!r}"
        if isinstance(module, RECTIFIERS) and not own_method(module):
            return nn.ReLU6 if isinstance(module, nn.ReLU6) else nn.ReLU
        if not isinstance(module, RECTIFIERS) and type(module).__module__ != nn.ReLU.__module__:
            return None
        if isinstance(module, nn.MultiheadAttention):  # which lies beside the activations
            raise GraphError(
                f"{where}: {name} has a softmax inside, for which levels have no form: train a burst transformer, or attention "
                "of your own without a softmax (docs/tutorials/attention.md)"
            )
    raise GraphError(f"{where}: {name} is no ReLU: {_instead(name, module is None)}")


def _instead(name: str, function: bool) -> str:
    """What to do about an activation that is no ReLU."""
    plain = name.lower().replace("_", "")
    if plain in ("softmax", "logsoftmax", "softmin"):
        return (
            "leave out a last softmax, without which the largest logit stays the largest; attention has a form without one "
            "(docs/tutorials/attention.md)"
        )
    if plain in ("sigmoid", "hardsigmoid", "logsigmoid"):
        return (
            "leave it out, and with it the gate that it makes, as in squeeze-and-excitation, which has no integer form"
        )
    if plain in SMOOTH:
        first = f"make it a module, nn.{SMOOTH[plain].__name__}; " if function else ""
        return f"{first}lbq.convert.with_relus(ann) replaces such modules; train that on for a little, and convert it"
    return "train the ANN with ReLUs"


def unrolled(plain: fx.GraphModule, images: Tensor, timesteps: int, make: MakeNeuron | None) -> fx.GraphModule:
    """The same network with neurons instead of rectifiers and time folded into the batch.

    The layers before the first neuron run once, unless sizes that they compute are used later: then everything runs at
    every timestep. make: makes a neuron for so many channels; None keeps the rectifiers.
    """
    net = copy.deepcopy(plain)
    graph = net.graph
    rectifiers = [
        n for n in graph.nodes if n.op == "call_module" and isinstance(net.get_submodule(n.target), RECTIFIERS)
    ]
    unbatched: set[fx.Node] = set()  # tensors without a batch in front
    for size in {min(len(images), 3), 2}:  # more than one, to tell a batch from a dimension of the same size
        ShapeProp(net).propagate(images[:size].clone())
        for node in graph.nodes:
            shape = getattr(node.meta.get("tensor_meta"), "shape", None)  # None for what is no tensor
            if shape is not None and tuple(shape[:1]) != (size,):
                unbatched.add(node)
        for node in rectifiers:
            shape = node.meta["tensor_meta"].shape
            if len(shape) < 2 or shape[0] != size:
                raise GraphError(f"layer {node.target!r}: its input must have the batch in front, features behind")
    image, out = graph.find_nodes(op="placeholder")[0], graph.output_node()
    static, timed = _following(graph, {image}), _following(graph, set(rectifiers))
    logits = out.args[0]
    if not isinstance(logits, fx.Node) or logits not in timed or "tensor_meta" not in logits.meta:
        raise GraphError("the ANN must return one tensor, its logits, computed from what its ReLUs give")

    stacks: dict[fx.Node, fx.Node] = {}  # of tensors that are repeated, folded: with time in front

    def repeated(x: fx.Node, before: fx.Node) -> fx.Node:
        with graph.inserting_before(before):
            stack = graph.call_function(torch.stack, ([x] * timesteps,))
            folded = graph.call_method("flatten", (stack, 0, 1))
        stacks[folded] = stack
        return folded

    entering = [(n, x) for n in graph.nodes if n in timed for x in n.all_input_nodes if x in static - timed]
    if any("tensor_meta" not in x.meta for _, x in entering):
        users = list(image.users)
        whole = repeated(image, image.next)
        for user in users:
            user.replace_input_with(image, whole)
    else:
        for node, x in entering:
            if x not in unbatched:
                node.replace_input_with(x, repeated(x, node))
    for node in rectifiers:
        if make is not None:
            neuron = make(node.meta["tensor_meta"].shape[1]).to(images.device).train(net.training)
            step = getattr(neuron, "step", None)
            if (
                isinstance(step, Tensor)
                and step.numel() > 1
                and _has_features_last(node, net, {*stacks, *stacks.values()})
            ):
                raise GraphError(
                    f"layer {node.target!r}: what comes out of nn.Linear has its features last, and a step for each channel is "
                    "for the second axis: take one step for the layer, neuron='lbq'"
                )
            if any(neuron is module for module in net.modules()):
                raise GraphError(f"layer {node.target!r}: its neuron stands elsewhere too: make one for each place")
            net.set_submodule(node.target, neuron)
        with graph.inserting_after(node):
            folded = graph.call_method("flatten", (node, 0, 1))
        node.replace_all_uses_with(folded, delete_user_cb=lambda user, folded=folded: user is not folded)
        x = node.args[0]
        if x in stacks:  # not folded and unfolded again: torch.export could not prove that the batch is as it was
            node.replace_input_with(x, stacks[x])
            if not x.users:
                graph.erase_node(x)
            continue
        with graph.inserting_before(node):
            node.replace_input_with(x, graph.call_method("unflatten", (x, 0, (timesteps, -1))))
    with graph.inserting_before(out):
        steps = graph.call_method("unflatten", (out.args[0], 0, (timesteps, -1)))
        out.args = (graph.call_method("mean", (steps, 0)),)
    graph.lint()
    net.recompile()
    return net


def _has_features_last(node: fx.Node, net: nn.Module, repeated: Container[fx.Node]) -> bool:
    """Whether a node reads tokens `[B, ..., features]`, as nn.Linear makes them, perhaps repeated over time."""
    if len(node.meta["tensor_meta"].shape) == 2:
        return False
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        module = net.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Linear | nn.LayerNorm):
            return True
        if node not in repeated and not isinstance(module, (nn.Dropout, nn.Identity, *RECTIFIERS)):
            return False  # it may have moved axes
    return False


def _following(graph: fx.Graph, first: set[fx.Node]) -> set[fx.Node]:
    """These nodes and all that are computed from them."""
    nodes = set(first)
    for node in graph.nodes:
        if any(x in nodes for x in node.all_input_nodes):
            nodes.add(node)
    return nodes
