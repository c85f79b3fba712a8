"""An ANN's graph, as torch.fx traces it, with a neuron in place of each ReLU and time folded into the batch."""

from __future__ import annotations

import copy
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from lbq.deploy.lowering.faithful import own_method
from lbq.deploy.lowering.trace import OfInput, traced
from lbq.errors import GraphError
from lbq.models import fold_time, unfold_time
from lbq.models.resnet import MakeNeuron
from lbq.neuron import ReLU, SpikingNeuron

RECTIFIERS = (nn.ReLU, nn.ReLU6, ReLU)
FUNCTIONS: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((torch.relu, torch.relu_, nn.functional.relu, "relu", "relu_"), nn.ReLU),
    nn.functional.relu6: nn.ReLU6,
}
IN_PLACE = (torch.relu_, "relu_")
OTHERS = {"celu", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_softmax",
          "logsigmoid", "mish", "prelu", "rrelu", "selu", "sigmoid", "silu", "softmax", "softmin", "softplus", "softsign",
          "tanh"}  # fmt: skip


def separate(net: nn.Module, dimensions: int) -> fx.GraphModule:
    """The network, traced, in which every place that rectifies has a module of its own, none of them in place."""
    plain = fx.GraphModule(net, traced(net, OfInput(dimensions)))
    modules = dict(plain.named_modules())
    taken = {name for name, module in modules.items() if not isinstance(module, RECTIFIERS)}
    found = 0
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
        given = node.name if module is None else str(node.target)
        name = next(n for n in chain([given], (f"{given}_{i}" for i in count(2))) if n not in taken)
        taken.add(name)
        found += 1
        x = node.all_input_nodes[0]
        in_place = (
            node.target in IN_PLACE or getattr(module, "inplace", False) or True in (*node.args, *node.kwargs.values())
        )
        later = [user for user in x.users if node < user] if in_place else []  # which see it rectified
        plain.add_submodule(name, kind())
        with plain.graph.inserting_before(node):
            new = plain.graph.call_module(name, (x,))
        node.replace_all_uses_with(new)
        for user in later:
            user.replace_input_with(x, new)
        plain.graph.erase_node(node)
    if not found:
        raise GraphError(f"{type(net).__name__} has no ReLU, in whose place a neuron could stand")
    plain.recompile()
    return plain


def _rectifier(node: fx.Node, module: nn.Module | None) -> type[nn.Module] | None:
    """The kind of rectifier that a node is, or None; activations of other kinds are refused."""
    if module is None:
        name = str(getattr(node.target, "__name__", node.target)).rstrip("_")  # in place or not
        where = f"{node.name} in the network's forward"
        if name not in OTHERS:
            return FUNCTIONS.get(node.target)
    else:
        name, where = type(module).__name__, f"layer {node.target!r}"
        if isinstance(module, RECTIFIERS) and not own_method(module):
            return nn.ReLU6 if isinstance(module, nn.ReLU6) else nn.ReLU
        if not isinstance(module, RECTIFIERS) and type(module).__module__ != nn.ReLU.__module__:
            return None
    raise GraphError(
        f"{where}: {name} is no ReLU, and levels begin at 0: train the ANN with ReLUs, and leave out a last softmax"
    )


def over_time(plain: fx.GraphModule, images: Tensor, timesteps: int, make: MakeNeuron | None) -> fx.GraphModule:
    """The same network with neurons in place of rectifiers, time folded into the batch. What comes before the first neuron
    runs once; where its sizes are used further on, everything runs at every timestep. make: None keeps the rectifiers."""
    net = copy.deepcopy(plain)
    graph = net.graph
    rectifiers = [
        n for n in graph.nodes if n.op == "call_module" and isinstance(net.get_submodule(n.target), RECTIFIERS)
    ]
    alone: set[fx.Node] = set()  # tensors that have no batch in front
    for size in {min(len(images), 3), 2}:  # more than one, to tell a batch from a dimension of the same size
        ShapeProp(net).propagate(images[:size].clone())
        alone |= {n for n in graph.nodes if (shape := _shape(n)) is not None and shape[:1] != (size,)}
        for node in rectifiers:
            shape = node.meta["tensor_meta"].shape
            if len(shape) < 2 or shape[0] != size:
                raise GraphError(
                    f"layer {node.target!r}: what it rectifies must have the batch in front, and features behind it"
                )
    image, out = graph.find_nodes(op="placeholder")[0], graph.output_node()
    static, moving = _following(graph, {image}), _following(graph, set(rectifiers))
    logits = out.args[0]
    if not isinstance(logits, fx.Node) or logits not in moving or "tensor_meta" not in logits.meta:
        raise GraphError("the ANN must return one tensor, its logits, computed from what its ReLUs give")

    def shown(x: fx.Node, before: fx.Node) -> fx.Node:
        with graph.inserting_before(before):
            return graph.call_method("flatten", (graph.call_function(torch.stack, ([x] * timesteps,)), 0, 1))

    entering = [(n, x) for n in graph.nodes if n in moving for x in n.all_input_nodes if x in static - moving]
    if any("tensor_meta" not in x.meta for _, x in entering):
        users = list(image.users)
        whole = shown(image, image.next)
        for user in users:
            user.replace_input_with(image, whole)
    else:
        for node, x in entering:
            if x not in alone:
                node.replace_input_with(x, shown(x, node))
    for node in rectifiers:
        if make is not None:
            neuron = make(node.meta["tensor_meta"].shape[1]).to(images.device).train(net.training)
            if any(neuron is module for module in net.modules()):
                raise GraphError(
                    f"layer {node.target!r}: the neuron stands elsewhere already: make a fresh one for each place"
                )
            net.set_submodule(node.target, neuron)
        with graph.inserting_after(node):
            folded = graph.call_method("flatten", (node, 0, 1))
        node.replace_all_uses_with(folded, delete_user_cb=lambda user, folded=folded: user is not folded)
        with graph.inserting_before(node):
            node.replace_input_with(node.args[0], graph.call_method("unflatten", (node.args[0], 0, (timesteps, -1))))
    with graph.inserting_before(out):
        steps = graph.call_method("unflatten", (out.args[0], 0, (timesteps, -1)))
        out.args = (graph.call_method("mean", (steps, 0)),)
    graph.lint()
    net.recompile()
    return net


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """Of the tensor that a node gives, as it was propagated last; None where it gives something else."""
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return None if shape is None else tuple(shape)


def _following(graph: fx.Graph, first: set[fx.Node]) -> set[fx.Node]:
    """These nodes and all that is computed from them."""
    found = set(first)
    for node in graph.nodes:
        if any(x in found for x in node.all_input_nodes):
            found.add(node)
    return found
