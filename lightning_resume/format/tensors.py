"""How torch's tensors, sizes, dtypes and devices are saved.

A tensor's data stands in its file in logical order, as any safetensors reader expects it; where the memory was laid out
otherwise without a gap (transposed, channels_last), the skeleton keeps the strides, and loading restores them. Tensors
over the same memory with the same shape and strides are written once and come back as one. An expanded tensor or a
slice comes back dense; a conjugate or negative view with its values. Autograd graphs, ``.grad``, hooks and python
attributes of tensors are not saved, and a tensor of an accelerator comes back on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from lightning_resume.format.skeleton import NUM_PLAIN_FIELDS, TAG, TENSOR
from lightning_resume.format.tree import Decoder, DecodeWalk, Encoder, EncodeWalk

FILE_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
TORCH_DTYPES = {name: dtype for dtype, name in FILE_DTYPES.items()}

# The file format has no name for these: they are written as a longer shape of another dtype. The newest ones are
# not in every supported torch.
_OTHER_DTYPES: dict[torch.dtype, tuple[str, int]] = {torch.complex128: ("F64", 2), torch.complex32: ("U8", 4)}
for _name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):
    if hasattr(torch, _name):
        _OTHER_DTYPES[getattr(torch, _name)] = ("U8", 1)

# What a checkpoint may name. A plain getattr would import: torch loads some of its packages when they are asked for.
_NAMES: dict[str, Any] = {
    name: value
    for name, value in vars(torch).items()
    if type(value) in (torch.dtype, torch.layout, torch.memory_format)
}

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _encode_tensor(tensor: torch.Tensor, walk: EncodeWalk) -> Any:
    try:
        _require_plain(tensor, walk)
        node = _encode_dense(tensor, walk) if tensor.layout is torch.strided else _encode_sparse(tensor, walk)
    except (RuntimeError, NotImplementedError) as error:  # say, a wrapper of functorch, without memory
        walk.refuse(f"its data cannot be read: {str(error).partition(chr(10))[0]}")
    if type(tensor) is Parameter:
        node["parameter"] = True
    if tensor.requires_grad:
        node["grad"] = True
    return node


def _require_plain(tensor: torch.Tensor, walk: EncodeWalk) -> None:
    if tensor.is_quantized:
        walk.refuse(f"it is a quantized tensor ({tensor.dtype})")
    if tensor.is_nested:
        walk.refuse("it is a nested tensor")
    if tensor.is_meta:
        walk.refuse("it is on the meta device and has no data")
    if tensor.dtype not in FILE_DTYPES and tensor.dtype not in _OTHER_DTYPES:
        walk.refuse(f"there is no exact encoding for the dtype {tensor.dtype}")
    if tensor.layout is not torch.strided and tensor.layout not in (torch.sparse_coo, *_COMPRESSED):
        walk.refuse(f"there is no exact encoding for the layout {tensor.layout}")


def _encode_dense(tensor: torch.Tensor, walk: EncodeWalk) -> dict[str, Any]:
    # This runs for each of what may be 10^5 tensors, at a save that training waits for.
    dtype, shape, stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
    is_contiguous, is_cpu, is_flipped = tensor.is_contiguous(), tensor.is_cpu, tensor.is_conj() or tensor.is_neg()
    numel = tensor.numel()
    if numel:
        if not has_memory(tensor, numel if is_contiguous else None):
            walk.refuse("its memory has been freed")
        place = (tensor.data_ptr(), dtype, shape, stride)
        if is_cpu and not place[0]:  # a wrapper, or zeros that torch has not written out
            walk.refuse("it has no memory of its own")
        identity: tuple[object, ...] = ("tensor", *place)
        if is_flipped or not is_cpu:
            identity = ("tensor", *place, tensor.device, tensor.is_conj(), tensor.is_neg())
    else:
        identity = ("tensor", id(tensor))  # empty tensors share no memory
    file_dtype = FILE_DTYPES.get(dtype)
    if file_dtype is None:
        file_dtype, parts = _OTHER_DTYPES[dtype]
        node = walk.refer(TENSOR, identity, file_dtype, (*shape, parts), bytes_of, tensor)
        node["dtype"] = str(dtype).removeprefix("torch.")
    else:
        source = bytes_in_place if is_contiguous and is_cpu and not is_flipped else bytes_of
        node = walk.refer(TENSOR, identity, file_dtype, shape, source, tensor)
    if numel and stride != _contiguous_stride(shape) and _is_dense(shape, stride):
        node["stride"] = list(stride)
    return node


def has_memory(tensor: torch.Tensor, span: int | None = None) -> bool:
    """Whether the storage of a dense tensor is as large as its shape needs; reading on would end the process.

    Args:
        tensor: with at least one item.
        span: items from its first to its last one, where that is known.
    """
    if span is None:
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + span) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def bytes_in_place(tensor: torch.Tensor) -> memoryview:
    """The data of a contiguous tensor on the CPU whose dtype the files have: not a copy.

    `gather` knows by this function that it may copy such a tensor without looking at its bytes.
    """
    return bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The data of a dense tensor in logical order; copied only where it lies otherwise, or on another device."""
    if not tensor.numel():
        return memoryview(b"")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def _encode_sparse(tensor: torch.Tensor, walk: EncodeWalk) -> dict[str, Any]:
    plain = tensor.detach()
    node: dict[str, Any] = {
        TAG: "sparse",
        "layout": str(plain.layout).removeprefix("torch."),
        "size": list(plain.shape),
    }
    if plain.layout == torch.sparse_coo:
        node["coalesced"] = plain.is_coalesced()
        node["indices"] = walk.child("indices", plain._indices())
        node["values"] = walk.child("values", plain._values())
        return node
    outer, inner = _COMPRESSED[plain.layout]
    node["outer"] = walk.child(outer, getattr(plain, outer)())
    node["inner"] = walk.child(inner, getattr(plain, inner)())
    node["values"] = walk.child("values", plain.values())
    return node


@functools.lru_cache(maxsize=4096)
def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides are those of a permuted contiguous tensor: no gap, no overlap."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _decode_tensor(node: dict[str, Any], walk: DecodeWalk) -> torch.Tensor:
    if len(node) == NUM_PLAIN_FIELDS:
        return walk.tensor(node)
    reference, raw = walk.data(node)
    if reference not in walk.shared:
        walk.shared[reference] = _lay_out(node, raw)
    return _dress(node, walk, reference, walk.shared[reference])


def _lay_out(node: dict[str, Any], raw: torch.Tensor) -> torch.Tensor:
    tensor = raw
    if "dtype" in node:
        dtype = _NAMES.get(node["dtype"])
        if dtype not in _OTHER_DTYPES:
            raise ValueError(f"the unknown dtype {node['dtype']!r}")
        tensor = torch.empty(raw.shape[:-1], dtype=dtype, device="cpu")
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).copy_(raw.reshape(-1).view(torch.uint8))
    if "stride" in node:
        shape, stride = tuple(tensor.shape), node["stride"]
        if not all(type(step) is int and 0 <= step < 2**63 for step in stride) or not _is_dense(shape, stride):
            raise ValueError("strides that do not fit the shape")
        tensor = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return tensor


def _dress(node: dict[str, Any], walk: DecodeWalk, reference: object, tensor: torch.Tensor) -> torch.Tensor:
    """Gives a tensor the node's type and requires_grad; the same object for every node that asks for the same."""
    is_parameter, requires_grad = bool(node.get("parameter")), bool(node.get("grad"))
    if not is_parameter and not requires_grad:
        return tensor
    key = (reference, is_parameter, requires_grad)
    if reference is not None and key in walk.shared:
        shared: torch.Tensor = walk.shared[key]
        return shared
    dressed = Parameter(tensor, requires_grad) if is_parameter else tensor.detach().requires_grad_()
    walk.shared[key] = dressed
    return dressed


def _decode_sparse(node: dict[str, Any], walk: DecodeWalk) -> torch.Tensor:
    size = tuple(node["size"])
    values = walk.child("values", node["values"])
    if node["layout"] == "sparse_coo":
        indices = walk.child("indices", node["indices"])
        coalesced = bool(node["coalesced"])
        tensor = torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=coalesced)
    else:
        layout = _NAMES.get(node["layout"])
        if layout not in _COMPRESSED:
            raise ValueError(f"the unknown layout {node['layout']!r}")
        outer, inner = walk.child("outer", node["outer"]), walk.child("inner", node["inner"])
        tensor = torch.sparse_compressed_tensor(outer, inner, values, size, layout=layout, check_invariants=True)
    return _dress(node, walk, None, tensor)


_BY_NAME: dict[type, str] = {
    torch.dtype: "torch.dtype",
    torch.layout: "torch.layout",
    torch.memory_format: "torch.memory_format",
}


def _encode_name(value: Any, walk: EncodeWalk) -> Any:
    name = str(value).removeprefix("torch.")
    if _NAMES.get(name) != value:
        walk.refuse(f"torch has no name for {value}")
    return {TAG: _BY_NAME[type(value)], "v": name}


def _decode_device(node: dict[str, Any], walk: DecodeWalk) -> torch.device:
    if type(node["v"]) is not str:  # a number would stand for whatever accelerator there is
        raise ValueError("a device that is no text")
    return torch.device(node["v"])


def _decoder_of_name(kind: type) -> Decoder:
    def decode(node: dict[str, Any], walk: DecodeWalk) -> Any:
        value = _NAMES.get(node["v"])
        if type(value) is not kind:
            raise ValueError(f"torch has no {kind.__name__} {node['v']!r}")
        return value

    return decode


ENCODERS: dict[type, Encoder] = {
    torch.Tensor: _encode_tensor,
    Parameter: _encode_tensor,
    torch.Size: lambda value, walk: {TAG: "torch.Size", "v": list(value)},
    torch.device: lambda value, walk: {TAG: "torch.device", "v": str(value)},
    **dict.fromkeys(_BY_NAME, _encode_name),
}
DECODERS: dict[str, Decoder] = {
    TENSOR: _decode_tensor,
    "sparse": _decode_sparse,
    "torch.Size": lambda node, walk: torch.Size(node["v"]),
    "torch.device": _decode_device,
    **{tag: _decoder_of_name(kind) for kind, tag in _BY_NAME.items()},
}
