"""Fast kernels that a model can use."""

from importlib.util import find_spec

_LINEAR = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}


def kernels(model_type: str) -> dict[str, bool]:
    """Return the names of packages with fast kernels for this type of model -> whether it can be imported here."""
    if not model_type.startswith(("qwen3_5", "qwen3_next")):
        return {}
    return {name: find_spec(module) is not None for name, module in _LINEAR.items()}
