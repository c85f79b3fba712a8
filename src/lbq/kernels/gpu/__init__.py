"""The burst sequence on a GPU: `operators` for PyTorch, `launch` starts the device code in `tiles`, `layout` of tensors."""
