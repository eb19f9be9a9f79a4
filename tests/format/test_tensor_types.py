"""Tensors come back bit-equal, with dtype, strides, ties and requires_grad; what cannot is refused by key path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format.checkpoint import read_checkpoint, verify_checkpoint, write_checkpoint
from lightning_resume.format.tensors import FILE_DTYPES

OTHER_DTYPES = [
    torch.complex128,
    torch.complex32,
    *(
        getattr(torch, name)
        for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
        if hasattr(torch, name)
    ),
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bytes: every NaN payload and subnormal may occur. Booleans are 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * size,), generator=generator)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [*FILE_DTYPES, *OTHER_DTYPES], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (3, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_shape_comes_back_bit_equal(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, same: Any
) -> None:
    """float8, bfloat16, uint16 to 64, bool, complex, scalars and empty tensors; the file stays a safetensors file."""
    value = random_bits(dtype, shape)

    write_checkpoint(tmp_path / "c", {"state_dict": {"w": value}})
    result = read_checkpoint(tmp_path / "c")["state_dict"]["w"]

    assert same(result, value)
    assert result.stride() == value.stride()
    assert list(load_file(tmp_path / "c" / "model.safetensors")) == ["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_nan_payloads_infinities_signed_zeros_and_subnormals_keep_their_bits(
    dtype: torch.dtype, round_trip: Any, same: Any
) -> None:
    """Compared as bytes: equality of numbers would not see any of it."""
    payloads = random_bits(dtype, (4096,))
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, torch.finfo(dtype).smallest_normal / 2], dtype=dtype)

    result = round_trip([payloads, special, -special])

    assert same(result, [payloads, special, -special])


class Tied(nn.Module):
    """An embedding whose weight is the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    """Both names hold the same tensor object again, and the file holds the data once."""
    model = Tied()

    write_checkpoint(tmp_path / "c", {"state_dict": model.state_dict()})
    result = read_checkpoint(tmp_path / "c")["state_dict"]

    assert list(result) == ["embedding.weight", "head.weight", "head.bias"]
    assert result["head.weight"] is result["embedding.weight"]
    assert torch.equal(result["head.weight"], model.head.weight)
    assert sorted(load_file(tmp_path / "c" / "model.safetensors")) == ["embedding.weight", "head.bias"]


def test_the_file_says_which_names_are_tied(tmp_path: Path) -> None:
    """Other readers find the alias in the file's metadata, where safetensors' save_model puts it too."""
    from safetensors import safe_open

    write_checkpoint(tmp_path / "c", {"state_dict": Tied().state_dict()})
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        metadata = file.metadata()

    assert metadata == {"format": "pt", "head.weight": "embedding.weight"}


def test_a_parameter_and_its_data_share_memory_again(round_trip: Any) -> None:
    """An object's type is its own; the memory below is one."""
    parameter = nn.Parameter(torch.ones(2))

    kept, data = round_trip([parameter, parameter.data])

    assert type(kept) is nn.Parameter
    assert type(data) is torch.Tensor
    assert kept.requires_grad
    assert not data.requires_grad
    assert kept.data_ptr() == data.data_ptr()


def test_a_tensor_shared_between_model_and_callbacks_is_written_once(tmp_path: Path) -> None:
    """It stands in the model's file, wherever the model stands in the state."""
    weight = torch.ones(1000)

    index = write_checkpoint(tmp_path / "c", {"callbacks": {"best": weight}, "state_dict": {"w": weight}})
    result = read_checkpoint(tmp_path / "c")

    assert "state.safetensors" not in index.files
    assert result["callbacks"]["best"] is result["state_dict"]["w"]


def test_overlapping_views_come_back_with_their_values(tmp_path: Path, same: Any) -> None:
    """Views of one memory that are not the same view are written one by one, and never shorten each other."""
    base = torch.arange(10.0)
    value = {"base": base, "head": base[:4], "tail": base[3:], "again": base[:4], "matrix": base[:4].view(2, 2)}

    write_checkpoint(tmp_path / "c", {"state_dict": value})
    result = read_checkpoint(tmp_path / "c")["state_dict"]

    assert same(result, value)
    assert result["head"] is result["again"]
    assert result["head"].untyped_storage().nbytes() == 16


def test_the_same_memory_as_another_dtype_is_another_tensor(round_trip: Any, same: Any) -> None:
    """Same place, shape and strides, but not the same values."""
    floats = torch.tensor([1.0, 2.0])

    result = round_trip([floats, floats.view(torch.int32)])

    assert same(result, [floats, floats.view(torch.int32)])


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(6).reshape(1, 6, 1).transpose(0, 1),
        torch.empty_strided((1, 3), (77, 1)).fill_(2),
        torch.randn(2, 2, dtype=torch.complex128).t(),
    ],
    ids=["transposed", "channels_last", "permuted", "ones", "odd", "complex128"],
)
def test_a_permuted_layout_comes_back_with_its_strides(value: torch.Tensor, tmp_path: Path, same: Any) -> None:
    """Values bit-equal, memory laid out as before; other readers of the file see the logical order."""
    write_checkpoint(tmp_path / "c", {"state_dict": {"w": value}, "optimizer_states": [{"state": {0: {"m": value}}}]})
    result = read_checkpoint(tmp_path / "c")

    assert same(result["state_dict"]["w"], value)
    assert result["state_dict"]["w"].stride() == value.stride()
    assert result["optimizer_states"][0]["state"][0]["m"] is result["state_dict"]["w"]
    if value.dtype != torch.complex128:
        assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["w"], value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3.0).expand(4, 3),
        torch.tensor(2.0).expand(2, 2),
        torch.arange(24.0).reshape(4, 6)[1:3, ::2],
        torch.arange(24.0).reshape(4, 6).t()[2:, 1],
    ],
    ids=["expanded", "scalar", "slice", "column"],
)
def test_a_view_with_gaps_or_repeats_comes_back_dense(value: torch.Tensor, round_trip: Any, same: Any) -> None:
    """It saves, and its values are bit-equal."""
    result = round_trip({"w": value})["w"]

    assert same(result, value)
    assert result.is_contiguous()
    assert result.untyped_storage().nbytes() == value.numel() * 4


def test_conjugate_and_negative_views_come_back_with_their_values(tmp_path: Path) -> None:
    """The bits in memory are not the values: writing them as they are would be wrong without an error."""
    base = torch.tensor([1 + 2j, -3 - 0.5j])
    value = {"base": base, "conj": base.conj(), "neg": base.conj().imag, "imag": base.imag}

    write_checkpoint(tmp_path / "c", {"state_dict": value})
    result = read_checkpoint(tmp_path / "c")["state_dict"]

    assert value["conj"].is_conj()
    assert value["neg"].is_neg()
    assert all(torch.equal(result[name], value[name].resolve_conj().resolve_neg()) for name in value)
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["conj"], base.conj().resolve_conj())


def sparse(name: str) -> torch.Tensor:
    """A tensor in one of the sparse layouts."""
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0], [-0.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 7.0]])
    if name == "uncoalesced":
        return torch.sparse_coo_tensor([[1, 1], [0, 0]], [1.0, 2.0], (2, 2))
    if name == "hybrid":
        return torch.sparse_coo_tensor([[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (3, 2))
    if name == "empty":
        return torch.sparse_coo_tensor(size=(2, 3))
    if name == "coo":
        return dense.to_sparse()
    return getattr(dense, f"to_sparse_{name}")(*[(2, 2)][: name.startswith("bs")])


@pytest.mark.parametrize("name", ["coo", "uncoalesced", "hybrid", "empty", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_comes_back_sparse(name: str, tmp_path: Path, same: Any) -> None:
    """Layout, indices, values and the coalesced flag."""
    value = sparse(name)

    write_checkpoint(tmp_path / "c", {"state_dict": {"mask": value, "mask.values": torch.ones(1)}})
    result = read_checkpoint(tmp_path / "c")["state_dict"]

    assert same(result["mask"], value)
    assert torch.equal(result["mask.values"], torch.ones(1))
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["mask.values"], torch.ones(1))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_and_requires_grad_are_kept(requires_grad: bool, round_trip: Any, same: Any) -> None:
    """A frozen parameter comes back frozen, a plain leaf with its flag."""
    value = [nn.Parameter(torch.ones(2), requires_grad), torch.ones(2, requires_grad=requires_grad)]

    result = round_trip(value)

    assert same(result, value)
    assert all(tensor.is_leaf for tensor in result)


def test_a_tensor_with_a_graph_comes_back_as_a_leaf(round_trip: Any) -> None:
    """Values and flag are kept; the graph is not part of a state."""
    value = torch.ones(2, requires_grad=True) * 2

    result = round_trip(value)

    assert result.is_leaf
    assert result.requires_grad
    assert torch.equal(result.detach(), value.detach())


class Labelled(torch.Tensor):
    """A tensor subclass with an attribute of its own."""


def labelled() -> torch.Tensor:
    """A tensor of the subclass."""
    tensor = torch.ones(2).as_subclass(Labelled)
    tensor.label = "x"
    return tensor


def freed() -> torch.Tensor:
    """A tensor whose memory was given back, as sharded training does it."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "Labelled": labelled,
    "UninitializedParameter": nn.parameter.UninitializedParameter,
    "UninitializedBuffer": nn.parameter.UninitializedBuffer,
    "meta": lambda: torch.ones(2, device="meta"),
    "quantized tensor .*quint8": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "NestedTensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "bits8": lambda: torch.empty(2, dtype=torch.bits8),
    "freed": freed,
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_an_exact_encoding_is_refused_and_the_last_checkpoint_kept(
    reason: str, tmp_path: Path
) -> None:
    """The error names the key path and the type; nothing is created, and what was there is untouched."""
    value = REFUSED[reason]()
    write_checkpoint(tmp_path / "c", {"state_dict": {"w": torch.ones(1)}})

    with pytest.raises(UnsupportedStateError, match=reason) as caught:
        write_checkpoint(tmp_path / "c", {"optimizer_states": [{"state": {3: {"exp_avg": value}}}]}, overwrite=True)

    assert caught.value.key_path == "optimizer_states.0.state.3.exp_avg"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert torch.equal(read_checkpoint(tmp_path / "c")["state_dict"]["w"], torch.ones(1))


def test_a_tensor_under_vmap_is_refused(tmp_path: Path) -> None:
    """It has no memory of its own to write."""

    def save(tensor: torch.Tensor) -> torch.Tensor:
        write_checkpoint(tmp_path / "c", {"a": tensor})
        return tensor

    with pytest.raises(UnsupportedStateError, match="cannot be read") as caught:
        torch.vmap(save)(torch.ones(2, 3))

    assert caught.value.key_path == "a"


@pytest.mark.parametrize(
    "name",
    ["__metadata__", "__metadata__#", "", ".", "a/b", "..", "\0", "Grüße 😀", "\ud800", "x" * 5000, "$", 'quote"\\'],
    ids=ascii,
)
def test_any_name_of_a_tensor_works(name: str, tmp_path: Path) -> None:
    """Also the one that the file format keeps for itself; the file can be read by the library."""
    state = {name: torch.ones(2), f"{name}#2": torch.zeros(1), "__metadata__": torch.full((1,), 7.0)}

    write_checkpoint(tmp_path / "c", {"state_dict": state})
    result = read_checkpoint(tmp_path / "c")["state_dict"]

    assert list(result) == list(state)
    assert all(torch.equal(result[key], state[key]) for key in state)
    assert len(load_file(tmp_path / "c" / "model.safetensors")) == len(state)


def test_names_that_clash_when_joined_are_told_apart(round_trip: Any) -> None:
    """`a.b`, the path a → b, and the keys 1 and "1" are different places."""
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}

    result = round_trip(value)

    assert [result["a.b"], result["a"]["b"], result[1], result["1"]] == [1, 2, 3, 4]


def test_the_model_keeps_its_names_where_nested_ones_clash(tmp_path: Path) -> None:
    """An extra state's tensors never take the name of a weight from it."""
    state = {"m": {"w": torch.tensor(2)}, "m.w": torch.tensor(1), "m._extra_state": [torch.tensor(3), "text"]}

    write_checkpoint(tmp_path / "c", {"state_dict": state})
    result = read_checkpoint(tmp_path / "c")["state_dict"]

    assert load_file(tmp_path / "c" / "model.safetensors")["m.w"] == 1
    assert (result["m.w"], result["m"]["w"], result["m._extra_state"]) == (1, 2, [3, "text"])


def test_the_callers_modes_do_not_change_what_is_read(tmp_path: Path) -> None:
    """Default device and dtype, inference mode and no_grad around the call: the same plain CPU tensors."""
    write_checkpoint(tmp_path / "c", {"a": [torch.ones(2), nn.Parameter(torch.ones(2))], "b": torch.ones(2, 2).t()})

    with torch.inference_mode(), torch.device("meta"):
        result = read_checkpoint(tmp_path / "c")

    assert all(tensor.device.type == "cpu" for tensor in [*result["a"], result["b"]])
    assert not any(tensor.is_inference() for tensor in [*result["a"], result["b"]])
    assert result["a"][1].requires_grad


def test_a_tensor_that_is_read_owns_its_memory(tmp_path: Path) -> None:
    """Keeping a small one does not keep the whole file in memory, and saving it does not save its neighbours."""
    write_checkpoint(tmp_path / "c", {"state_dict": {"a": torch.ones(2), "b": torch.ones(1000)}})

    result = read_checkpoint(tmp_path / "c")["state_dict"]["a"]

    assert result.untyped_storage().nbytes() == 8
    assert result._base is None


def test_saving_draws_no_random_number_and_leaves_the_tensors_alone(tmp_path: Path) -> None:
    """No interference: streams, versions and gradients are as before."""
    import random

    import numpy as np

    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    versions = [parameter._version for parameter in model.parameters()]

    write_checkpoint(tmp_path / "c", {"state_dict": model.state_dict()})
    verify_checkpoint(tmp_path / "c")
    read_checkpoint(tmp_path / "c")

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert [parameter._version for parameter in model.parameters()] == versions
    assert all(parameter.grad is not None for parameter in model.parameters())
