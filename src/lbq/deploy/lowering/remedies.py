"""What to write in place of operations and layers that have no integer form, and of what torch.fx cannot trace."""

from __future__ import annotations

WHOLE_SEQUENCES = (
    "give layers and neurons all timesteps, [T, B, ...], and all channels, with weights 0 where they are to see nothing"
)
LISTED = "use what docs/howto/deploy.md lists under 'What a network may contain'"
TUTORIAL = "docs/tutorials/attention.md"
ATTENTION = (
    f"(Q K^T) V of neurons' outputs has one, without softmax: write it as {TUTORIAL} does, "
    "or train model.id=spikformer4x384"
)
TRANSFORMER_LAYERS = (
    "multiheadattention transformerencoderlayer transformerencoder "
    "transformerdecoderlayer transformerdecoder transformer"
)
NAMES_BY_REMEDY = {  # of operations and kinds of layers
    f"return the logits' mean over time, whose order it keeps; in attention, leave it out, as {TUTORIAL} does": "softmax",
    "return the logits' mean over time, whose order it keeps": "log_softmax logsoftmax",
    "put a neuron of lbq.neuron in its place; if it gates channels, as in squeeze-and-excitation, leave the gate out, or let "
    "that neuron gate the outputs of another": "sigmoid hardsigmoid",
    "put a neuron of lbq.neuron in its place": "tanh gelu hardswish mish silu elu leaky_relu "
    "leakyrelu prelu relu6 hardtanh clamp",
    "use BatchNorm, which folds into weights": "groupnorm group_norm layernorm layer_norm instancenorm2d rmsnorm",
    "let a convolution or linear layer read the whole tensor, with weights 0 where it is to see nothing; give Q, K and V a "
    "layer and a neuron each": "chunk split narrow",
    f"{WHOLE_SEQUENCES}; of the logits, return the mean or the sum over time, not one timestep": "getitem select unbind",
    "use convolutions and pools, which keep heights and widths or make them smaller; outputs by pixel, as for "
    "segmentation, are not supported": "upsample upsamplingnearest2d "
    "interpolate convtranspose2d pixelshuffle pixel_shuffle",
    f"its softmax and LayerNorm have none, whatever its activation is; {ATTENTION}": TRANSFORMER_LAYERS,
    f"its softmax has none; {ATTENTION}": "scaled_dot_product_attention multiheadattention",
    "write it with @, as in q.transpose(-2, -1) @ k": "einsum",
    "levels are multiplied with weights, by a convolution or a linear layer, or with levels": "matmul bmm mul imul",
    "pad height and width with zeros, or let the convolution pad": "pad reflectionpad2d replicationpad2d circularpad2d",
    "write x = x + y, x = x * 2 and so on": "add_ sub_ mul_ div_ relu_",
    "write flatten(1), or flatten(2) with time in front; of signals [B, C, 1, L] keep all axes, and read them by Conv2d with "
    "kernels (1, k)": "squeeze",
}
REMEDIES = {name: text for text, names in NAMES_BY_REMEDY.items() for name in names.split()}

UNTRACED = {  # by what torch.fx, and others that it calls, say
    "got _Value": "forward_step, forward_chunk and levels cannot be deployed; use neuron(currents) of whole sequences",
    "Proxy object cannot be iterated": f"a loop over a tensor, or over sizes not known, cannot be deployed: {WHOLE_SEQUENCES}; "
    "write sizes as numbers or -1",
    "control flow": "a branch on a tensor's values, or on the size of the batch, cannot be deployed: write one course alone",
    "'len' is not supported": "len of a tensor is not known while it is traced: write x.shape[0]",
    "unknown to einops": "einops does not know its tensors: write flatten, unflatten, reshape or transpose(0, 1)",
}


def remedy(name: str) -> str:
    """For an operation or a kind of layer."""
    return REMEDIES.get(name.lower(), LISTED)


def untraced(reason: str) -> str:
    """Why a network cannot be traced, with what to write instead where that is known."""
    return next((better for said, better in UNTRACED.items() if said in reason), reason)
