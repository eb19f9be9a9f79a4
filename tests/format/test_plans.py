"""With a plan that is kept, a save gives the files that it gives without one; any difference of structure is seen."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format import blocks, plans, skeleton
from lightning_resume.format.checkpoint import read_checkpoint
from lightning_resume.format.image import Image
from lightning_resume.format.plans import PlanCache
from lightning_resume.format.prepared import prepare_checkpoint

State = dict[str, Any]


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: Any) -> None:
    """Plans are kept for any number of tensors."""
    monkeypatch.setattr(plans, "MIN_TENSORS", 1)


def state(step: int = 0) -> State:
    """A state in which the kinds of values that training has occur; its numbers depend on the step."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (step + 1))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "epoch": step,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": step, "_last_lr": [0.5**step], "zero": -0.0 if step else 0.0}],
        "loops": {"progress": {"ready": step, "done": {1: (step, None)}}, "name": f"step {step}"},
        "order": list(range(step, step + 600)),
        "array": np.arange(6.0) + step,
        "parameter": nn.Parameter(torch.randn(2, 1)),
        "set": {step},
    }


def is_planned(cache: PlanCache, value: State, folder: Path, **arguments: Any) -> bool:
    """Saves with the cache, in turn by way of an image and without; whether its plan could be used.

    The files are the ones that are written without a cache, or an error passes.
    """
    version = cache.version
    before = cache._plan
    checkpoint = prepare_checkpoint(folder / f"with-{version}", value, plans=cache, **arguments)
    if version % 2:
        checkpoint.copy_into(Image())
    index = checkpoint.commit()
    was_used = before is not None and cache._plan is before
    fresh = prepare_checkpoint(folder / f"without-{version}", value, **arguments).commit()
    assert index.files == fresh.files
    return was_used


def test_a_plan_gives_the_same_files(tmp_path: Path) -> None:
    """From the second save on it is used, while all numbers and tensors change."""
    cache = PlanCache()

    used = [is_planned(cache, state(step), tmp_path, rank_states=[{"step": step}]) for step in range(6)]

    assert used == [False, True, True, True, True, True]


def replaced(key: str, change: Callable[[Any], Any]) -> Callable[[State], Any]:
    """A change of one entry."""
    return lambda value: value.update({key: change(value[key])})


def in_weights(change: Callable[[torch.Tensor], Any]) -> Callable[[State], Any]:
    """A change of one of the model's tensors."""
    return lambda value: value["state_dict"].update({"0.weight": change(value["state_dict"]["0.weight"])})


def share(value: State) -> None:
    value["optimizer_states"][0]["state"][0]["exp_avg"] = value["state_dict"]["0.weight"]


def rename(value: State) -> None:
    value["state_dict"] = OrderedDict((key.replace("0.", "first."), item) for key, item in value["state_dict"].items())


def reorder(value: State) -> None:
    value["state_dict"].move_to_end("0.weight")


def renumber(value: State) -> None:
    steps = value["optimizer_states"][0]["state"]
    value["optimizer_states"][0]["state"] = {float(key): item for key, item in steps.items()}


def share_with_rest(value: State) -> None:
    value["loops"]["best"] = value["state_dict"]["0.weight"]


def share_with_rest_otherwise(value: State) -> None:
    value["loops"]["best"] = value["optimizer_states"][0]["state"][0]["exp_avg"].view(-1)


def hold_array(value: State) -> None:
    value["optimizer_states"][0]["state"][0]["step"] = value["array"]


def hold_list(value: State) -> None:
    value["optimizer_states"][0]["state"][0]["step"] = value["order"]


def note_version(value: State) -> None:
    value["state_dict"]._metadata[""]["version"] = 7


def grown(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, its memory longer than it needs."""
    tensor.untyped_storage().resize_(tensor.nbytes + 64)
    return tensor


CHANGES: dict[str, Callable[[State], Any]] = {
    "dtype": in_weights(torch.Tensor.double),
    "shape": in_weights(lambda tensor: tensor.view(-1)),
    "strides": in_weights(lambda tensor: tensor.t().contiguous().t()),
    "strides of one": replaced("parameter", lambda tensor: nn.Parameter(tensor.detach().as_strided((2, 1), (1, 7)))),
    "part of another": in_weights(lambda tensor: torch.cat([tensor, tensor])[:4]),
    "a gap": in_weights(lambda tensor: torch.cat([tensor, tensor], 1)[:, :3]),
    "negative view": in_weights(lambda tensor: tensor._neg_view()),
    "conjugate view": in_weights(lambda tensor: torch.complex(tensor, tensor).conj()),
    "sparse": in_weights(torch.Tensor.to_sparse),
    "compressed": in_weights(torch.Tensor.to_sparse_csr),
    "grown": in_weights(lambda tensor: grown(tensor)),
    "in shared memory": in_weights(torch.Tensor.share_memory_),
    "in memory of numpy": in_weights(lambda tensor: torch.from_numpy(tensor.numpy().copy())),
    "a subclass": in_weights(lambda tensor: nn.Buffer(tensor)),
    "parameter": in_weights(nn.Parameter),
    "no parameter": replaced("parameter", lambda tensor: tensor.detach()),
    "requires no gradient": replaced("parameter", lambda tensor: nn.Parameter(tensor.detach(), False)),
    "no tensor": in_weights(lambda tensor: 3),
    "a tensor": replaced("epoch", torch.tensor),
    "shared": share,
    "shared with the rest": share_with_rest,
    "shared with the rest in another shape": share_with_rest_otherwise,
    "an array of the rest in the optimizer": hold_array,
    "a long list of the rest in the optimizer": hold_list,
    "renamed": rename,
    "other order": reorder,
    "keys of another type": renumber,
    "attribute": note_version,
    "one more": lambda value: value["state_dict"].update(more=torch.ones(3)),
    "one less": lambda value: value["state_dict"].popitem(),
    "one more at the top": lambda value: value.update(more=1),
    "one less at the top": lambda value: value.popitem(),
    "plain dict": replaced("state_dict", dict),
    "tuple": replaced("lr_schedulers", tuple),
    "bool": replaced("epoch", bool),
    "float": replaced("epoch", float),
    "a list for a number": replaced("epoch", lambda number: [number]),
    "a list for a list": replaced("order", lambda items: [*items, 1]),
    "a short list": replaced("order", lambda items: items[:3]),
    "a list of floats": replaced("order", lambda items: list(map(float, items))),
    "an array's dtype": replaced("array", lambda array: array.astype(np.float32)),
    "an array's shape": replaced("array", lambda array: array.reshape(2, 3)),
    "an array's order": replaced("array", lambda array: np.asfortranarray(array.reshape(2, 3))),
    "an array for a number": replaced("epoch", lambda number: np.ones(2)),
    "text": replaced("loops", lambda loops: {**loops, "name": "\ud800"}),
    "big number": replaced("epoch", lambda number: 2**70),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_that_is_built_otherwise_gives_its_own_files(change: Callable[[State], Any], tmp_path: Path) -> None:
    """Whatever has changed, with the plan or without it; and the next state is planned again."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    changed = state(1)
    change(changed)

    is_planned(cache, changed, tmp_path)
    is_planned(cache, changed, tmp_path)
    is_planned(cache, state(2), tmp_path)

    assert is_planned(cache, state(3), tmp_path)


@pytest.mark.parametrize(
    ("first", "second"), [({"max_shard_bytes": 100}, {}), ({"model_key": "loops"}, {}), ({}, {"frozen": ["0.weight"]})]
)
def test_another_layout_is_another_plan(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    """The plan depends on the arguments too."""
    cache = PlanCache()

    assert not is_planned(cache, state(), tmp_path, **first)
    assert not is_planned(cache, state(), tmp_path, **second)


def test_what_cannot_be_saved_is_named_with_a_plan_too(tmp_path: Path) -> None:
    """The key path is the one that is told without it; the state after it is saved."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    wrong, also_wrong = state(1), state(2)
    wrong["loops"]["progress"]["ready"] = object()
    also_wrong["optimizer_states"][0]["param_groups"][0]["lr"] = object()

    with pytest.raises(UnsupportedStateError) as caught:
        prepare_checkpoint(tmp_path / "c", wrong, plans=cache)
    used = is_planned(cache, state(3), tmp_path)
    with pytest.raises(UnsupportedStateError) as also_caught:
        prepare_checkpoint(tmp_path / "d", also_wrong, plans=cache)

    assert caught.value.key_path == "loops.progress.ready"
    assert used  # it is of the model and the optimizers alone
    assert also_caught.value.key_path == "optimizer_states.0.param_groups.0.lr"
    assert not is_planned(cache, state(4), tmp_path)


def test_what_grows_beside_model_and_optimizer_is_no_matter(tmp_path: Path) -> None:
    """Losses, names of checkpoints and whatever else callbacks keep: the plan of the tensors is used all the same."""
    cache = PlanCache()

    used = []
    for step in range(5):
        value = state(step)
        value["callbacks"] = {
            "history": {"losses": torch.rand(step, dtype=torch.float64), "steps": list(range(step))},
            "best": {f"step-{number}": torch.tensor(number) for number in range(step)},
            "order": np.arange(100 * step),
        }
        used.append(is_planned(cache, value, tmp_path, rank_states=[{"step": torch.ones(step)}]))

    assert used == [False, True, True, True, True]


def test_a_text_that_is_too_long_is_refused_with_a_plan_too(monkeypatch: Any, tmp_path: Path) -> None:
    """It is as without; the state after it is saved."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    is_planned(cache, state(1), tmp_path)
    long = state(2)
    long["loops"]["name"] = "long" * 25_000
    for module in (plans, skeleton):
        monkeypatch.setattr(module, "MAX_STATE_BYTES", 100_000)

    with pytest.raises(UnsupportedStateError, match="bytes of JSON"):
        prepare_checkpoint(tmp_path / "c", long, plans=cache)

    is_planned(cache, state(3), tmp_path)
    assert is_planned(cache, state(4), tmp_path)


def test_a_tensor_whose_memory_is_gone_is_refused(tmp_path: Path) -> None:
    """Reading on would end the process."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    freed = state(1)
    freed["state_dict"]["0.weight"].untyped_storage().resize_(4)

    with pytest.raises(UnsupportedStateError, match=r"state_dict\.0\.weight"):
        prepare_checkpoint(tmp_path / "c", freed, plans=cache).copy_into(Image())


def comes_back_shorter(tensor: torch.Tensor) -> bool:
    """Resizes a tensor's storage twice; whether it lies where it lay, and is too small for the tensor."""
    address, num_bytes = tensor.data_ptr(), tensor.nbytes
    tensor.untyped_storage().resize_(2 * num_bytes)
    tensor.untyped_storage().resize_(num_bytes - 4)
    return tensor.data_ptr() == address


def test_a_storage_that_comes_back_shorter_to_its_address_is_refused(tmp_path: Path) -> None:
    """Reading on would save what lies behind it, of something else."""
    fences = []
    for number in range(100):
        cache, weights = PlanCache(), {"weight": torch.randn(1000)}
        fences.append((weights, torch.randn(1000)))  # kept: the next one lies elsewhere
        for step in range(2):
            prepare_checkpoint(tmp_path / f"{number}-{step}", {"state_dict": weights}, plans=cache).commit()
        if comes_back_shorter(weights["weight"]):
            break
    else:
        pytest.skip("no storage came back to its address")

    with pytest.raises(UnsupportedStateError, match=r"state_dict\.weight"):
        prepare_checkpoint(tmp_path / "c", {"state_dict": weights}, plans=cache).commit()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, its memory given back."""
    tensor.untyped_storage().resize_(0)
    return tensor


UNSUPPORTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8),
    "meta": lambda tensor: tensor.to("meta"),
    "mkldnn": torch.Tensor.to_mkldnn,
    "subclass": lambda tensor: tensor.as_subclass(type("Other", (torch.Tensor,), {})),
    "freed": lambda tensor: freed(tensor),
    "functional": torch._to_functional_tensor,
    "zeros that are not there": lambda tensor: torch._efficientzerotensor(tensor.shape),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.filterwarnings("ignore:.*quant")
@pytest.mark.parametrize("finish", ["copy", "commit"])
@pytest.mark.parametrize("change", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_tensor_that_cannot_be_saved_is_named_with_a_plan_too(
    change: Callable[[torch.Tensor], Any], finish: str, tmp_path: Path
) -> None:
    """It stands where a plain one of the same shape stood: it is seen, and refused as it is without a plan."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    wrong = state(1)
    wrong["state_dict"]["0.weight"] = change(wrong["state_dict"]["0.weight"])

    with pytest.raises(UnsupportedStateError) as caught:
        checkpoint = prepare_checkpoint(tmp_path / "c", wrong, plans=cache)
        checkpoint.copy_into(Image()) if finish == "copy" else checkpoint.commit()

    assert caught.value.key_path == "state_dict.0.weight"
    assert not list(tmp_path.glob("c*")) and not list(tmp_path.glob(".c*"))
    assert not is_planned(cache, state(2), tmp_path)


@pytest.mark.parametrize("finish", ["copy", "commit"])
def test_a_tensor_that_is_cut_short_before_it_is_copied_is_refused(finish: str, tmp_path: Path) -> None:
    """It is looked at right before it is copied."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    later = state(1)
    checkpoint = prepare_checkpoint(tmp_path / "c", later, plans=cache)
    later["optimizer_states"][0]["state"][1]["exp_avg"].untyped_storage().resize_(4)

    with pytest.raises(UnsupportedStateError) as caught:
        checkpoint.copy_into(Image()) if finish == "copy" else checkpoint.commit()

    assert caught.value.key_path == "optimizer_states.0.state.1.exp_avg"
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("finish", ["copy", "commit"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (5,)])
def test_a_tensor_that_is_given_other_memory_before_it_is_copied_is_saved_as_it_is(
    shape: tuple[int, ...], finish: str, tmp_path: Path
) -> None:
    """Of the same shape or of another: it is read when it is copied, with a plan as without."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    later = state(1)
    checkpoint = prepare_checkpoint(tmp_path / "c", later, plans=cache)
    later["optimizer_states"][0]["state"][1]["exp_avg"].data = torch.full(shape, 7.0)

    if finish == "copy":
        checkpoint.copy_into(Image())
    index = checkpoint.commit()

    assert index.files == prepare_checkpoint(tmp_path / "d", later).commit().files
    read = read_checkpoint(tmp_path / "c")["optimizer_states"][0]["state"][1]["exp_avg"]
    assert torch.equal(read, torch.full(shape, 7.0))


def test_a_state_whose_tensors_never_fit_is_not_planned_for_ever(tmp_path: Path) -> None:
    """A difference that is found when tensors are copied costs all of the planning again: three times, no more."""
    cache = PlanCache()
    used = [
        is_planned(cache, {"state_dict": {"w": torch.ones(2, n), "v": torch.ones(3)}}, tmp_path) for n in range(1, 9)
    ]

    assert used == [False] * 8
    assert cache._plan is None


@pytest.mark.parametrize("block_bytes", [4096, 8192, 4 * 2**20])
def test_rows_of_tensors_are_cut_where_the_blocks_of_a_file_are(
    block_bytes: int, monkeypatch: Any, tmp_path: Path
) -> None:
    """Tensors of all sizes and several dtypes, more than a row has, some larger than a block."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    cache = PlanCache()
    generator = torch.Generator().manual_seed(0)
    sizes = [*torch.randint(1, 900, (600,), generator=generator).tolist(), 30_000, 1, 300_000, 4096, 5]
    dtypes = [torch.float32, torch.int64, torch.uint8, torch.bfloat16]

    used = [
        is_planned(
            cache,
            {
                "step": step,
                "state_dict": {
                    f"w{n}": torch.randint(0, 250, (size,), generator=generator).to(dtypes[n % 4])
                    for n, size in enumerate(sizes)
                },
            },
            tmp_path,
        )
        for step in range(5)
    ]

    assert used == [False, True, True, True, True]


def test_rows_serve_another_size_of_blocks_too(monkeypatch: Any, tmp_path: Path) -> None:
    """A file is right however the blocks are cut when it is written."""
    cache = PlanCache()
    value = {"state_dict": {f"w{n}": torch.randn(100) for n in range(400)}}
    is_planned(cache, value, tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)

    assert is_planned(cache, value, tmp_path)
    assert is_planned(cache, value, tmp_path)


@pytest.mark.parametrize("key", ["optimizer_states", "rest"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(6.0),
        lambda: [float(number) for number in range(600)],
        lambda: bytearray(2000),
    ],
    ids=["array", "packed list", "bytearray"],
)
def test_data_that_comes_to_be_shared_stays_shared(make: Callable[[], Any], key: str, tmp_path: Path) -> None:
    """What was two objects of equal contents, and is one under two names now, is one in the files."""
    cache, one, weights = PlanCache(), make(), {"weight": torch.randn(2)}

    def is_planned_with(first: Any, second: Any) -> bool:
        value = {"state_dict": weights, "optimizer_states": {"first": first}, "rest": {}}
        value[key]["second"] = second
        return is_planned(cache, value, tmp_path)

    used = [is_planned_with(make(), make()), is_planned_with(make(), make()), is_planned_with(one, one)]

    assert used == [False, True, False]
    read = read_checkpoint(tmp_path / "with-2")
    assert read["optimizer_states"]["first"] is read[key]["second"]


def test_a_name_that_is_written_as_a_tag_makes_no_difference(tmp_path: Path) -> None:
    """A top-level key, or an attribute, that is called as the mark of a node is."""
    cache, named = PlanCache(), OrderedDict(weight=torch.randn(2))
    vars(named).update({"$": 0, "v": [1]})

    for _ in range(2):
        is_planned(cache, {"state_dict": {"weight": torch.randn(2)}, "$": 1, "v": [1, 2, 3]}, tmp_path)
        is_planned(cache, {"state_dict": named}, tmp_path)


def test_texts_of_a_state_are_never_taken_for_marks(tmp_path: Path) -> None:
    """Values and keys that look like the plan's own marks come out as they are."""
    cache = PlanCache()

    used = [
        is_planned(
            cache,
            {
                "text": f'{{"$":{step}}}',
                "keys": {'{"$":0}': [step, {"$": step}], "$": {"$": 0}},
                "state_dict": {"w": torch.ones(3) * step},
                "nested": {"a": {3: torch.ones(2) * step}, "b": [{"$": 1}, [torch.zeros(1)], step]},
            },
            tmp_path,
        )
        for step in range(4)
    ]

    assert used == [False, True, True, True]


def test_a_state_that_was_prepared_too_early_is_not_written(tmp_path: Path) -> None:
    """Its plan holds the tensors of the next one by then."""
    cache = PlanCache()
    first = prepare_checkpoint(tmp_path / "1", state(), plans=cache)
    prepare_checkpoint(tmp_path / "2", state(1), plans=cache)

    with pytest.raises(RuntimeError, match="another state was prepared"):
        first.commit()
    with pytest.raises(RuntimeError, match="another state was prepared"):
        first.copy_into(Image())

    assert list(tmp_path.iterdir()) == []


def test_a_plan_keeps_no_tensor_alive(tmp_path: Path) -> None:
    """Memory is the state's own again as soon as it was copied."""
    cache, seen = PlanCache(), []

    for step in range(3):
        value = state(step)
        seen += [weakref.ref(tensor) for tensor in value["optimizer_states"][0]["state"][0].values()]
        is_planned(cache, value, tmp_path)
        del value
    wrong = state(3)
    seen += [weakref.ref(tensor) for tensor in wrong["optimizer_states"][0]["state"][0].values()]
    wrong["loops"] = object()
    with pytest.raises(UnsupportedStateError):
        prepare_checkpoint(tmp_path / "c", wrong, plans=cache)
    del wrong

    assert cache._plan is not None
    assert [number for number, tensor in enumerate(seen) if tensor() is not None] == []


def test_a_state_that_is_never_the_same_is_no_longer_planned(tmp_path: Path) -> None:
    """After some attempts nothing is spent on it."""
    cache = PlanCache()

    for number in range(5):
        is_planned(cache, {"state_dict": {"w": torch.ones(number + 1)}}, tmp_path)

    assert cache._plan is None


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("items", [[None] * 600, ["a"] * 600, [1, *[0.5] * 599], [2**70, *[1] * 599]])
@pytest.mark.parametrize("number", [1, 0.5])
def test_a_long_list_that_comes_to_hold_numbers_alone_goes_to_a_file(
    number: float, items: list[Any], kind: Callable[[list[Any]], Any], tmp_path: Path
) -> None:
    """As it does without a plan; and it stays one list where it has two names."""
    cache, long = PlanCache(), kind([number] * 600)
    first = {"state_dict": {"w": torch.ones(3)}, "optimizer_states": {"items": kind(items)}, "same": 1}
    second = {"state_dict": {"w": torch.ones(3)}, "optimizer_states": {"items": long}, "same": long}

    assert not is_planned(cache, first, tmp_path)
    assert not is_planned(cache, second, tmp_path)

    read = read_checkpoint(tmp_path / "with-1")
    assert read["optimizer_states"]["items"] is read["same"]


def test_a_key_that_only_equals_the_models_is_refused_with_a_plan_too(tmp_path: Path) -> None:
    """A text of another type would come back as a plain one."""
    cache = PlanCache()
    is_planned(cache, state(), tmp_path)
    wrong = state(1)
    wrong[type("Key", (str,), {})("state_dict")] = wrong.pop("state_dict")

    with pytest.raises(UnsupportedStateError, match="top-level keys of a state are plain texts"):
        prepare_checkpoint(tmp_path / "c", wrong, plans=cache)


@pytest.mark.parametrize("too_many", [0, 1])
def test_what_is_nested_too_deeply_is_refused_with_a_plan_too(too_many: int, tmp_path: Path) -> None:
    """The levels above count, also where they are the plan's."""
    cache = PlanCache()

    def nested(levels: int) -> State:
        inner: Any = 1
        for _ in range(levels):
            inner = [inner]
        return {"state_dict": {"w": torch.ones(3)}, "optimizer_states": OrderedDict(a=({"b": deque([inner])},))}

    assert not is_planned(cache, nested(1), tmp_path)
    deep = nested(skeleton.MAX_DEPTH - 5 + too_many)  # beside three containers, the deque and the number

    if too_many:
        with pytest.raises(UnsupportedStateError, match="nested more than"):
            prepare_checkpoint(tmp_path / "c", deep, plans=cache)
    else:
        assert is_planned(cache, deep, tmp_path)


def test_a_plan_keeps_no_array_alive_when_the_rest_cannot_be_saved(tmp_path: Path) -> None:
    """What the optimizer has beside its tensors is let go of, too."""
    cache, arrays = PlanCache(), [np.arange(6.0) for _ in range(2)]
    values = [{"state_dict": {"w": torch.ones(3)}, "optimizer_states": {"array": array}} for array in arrays]
    seen = weakref.ref(arrays[1])
    is_planned(cache, values[0], tmp_path)
    values[1]["rest"] = object()

    with pytest.raises(UnsupportedStateError, match="rest"):
        prepare_checkpoint(tmp_path / "c", values[1], plans=cache)
    del values[1], arrays[1]

    assert cache._plan is not None
    assert seen() is None
