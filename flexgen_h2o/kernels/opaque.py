"""Tensors in a layout of oneDNN's around memory of ours, by torch's C interface for compiled models. It is private."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch


def opaque_tensor(
    memory: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: torch.Tensor
) -> torch.Tensor:
    """`memory`, contiguous, as a matrix of `shape` in a layout, serialised (uint8). It does not keep the memory alive.

    dtype: bfloat16 or int8. Raises AttributeError, OSError or RuntimeError where torch has other operations.
    """
    torch_cpu = _torch_cpu()
    name = str(dtype).removeprefix("torch.")
    sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
    handle = ctypes.c_void_p()
    code = torch_cpu.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(2), sizes, strides, ctypes.c_int64(0),
        getattr(torch_cpu, f"aoti_torch_dtype_{name}")(), torch_cpu.aoti_torch_device_type_cpu(), 0,
        ctypes.byref(handle), torch_cpu.aoti_torch_layout__mkldnn(), ctypes.c_void_p(layout.data_ptr()),
        ctypes.c_int64(layout.numel()),
    )  # fmt: skip
    if code:
        raise RuntimeError("torch made no tensor of blocked rows")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    opaque: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return opaque


@lru_cache(maxsize=1)
def _torch_cpu() -> ctypes.CDLL:
    """The library that torch itself has loaded. OSError where it is not there."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
