"""Stands in for SGLang's CUDA kernels on a machine without CUDA, where it imports them and calls none."""

from collections.abc import Callable


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA.")

    return kernel
