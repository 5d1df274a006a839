import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from app.diloco.fragments import (
    Layout,
    TensorSpec,
    build_layout,
    due_step_offset,
    gather,
    pieces_of,
    scatter_,
    specs_of,
    table,
)


def llama_specs(vocab: int = 1024, hidden: int = 128, layers: int = 2, inner: int = 344) -> list[TensorSpec]:
    """Shapes of a Llama with a tied head, by name."""
    specs = [
        TensorSpec("embed_tokens.weight", (vocab, hidden), True),
        TensorSpec("norm.weight", (hidden,), False),
    ]
    for layer in range(layers):
        shapes = dict.fromkeys(("q", "k", "v", "o"), (hidden, hidden))
        shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        specs += [TensorSpec(f"layers.{layer}.{name}.weight", shape, False) for name, shape in shapes.items()]
        specs += [TensorSpec(f"layers.{layer}.norm{i}.weight", (hidden,), False) for i in (1, 2)]
    return specs


def covered(layout: Layout, name: str) -> list[int]:
    pieces = [piece for fragment in layout.fragments for piece in fragment.pieces if piece.name == name]
    return sorted(row for piece in pieces for row in range(piece.start_row, piece.stop_row))


class Small(nn.Module):
    """A model with a tied head, a frozen tensor, a buffer, a scalar and an empty parameter."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.hidden = nn.Linear(3, 3)
        self.lm_head = nn.Linear(3, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("table", torch.zeros(7))


def test_shipped_model_is_balanced() -> None:
    specs = llama_specs()
    layout = build_layout(specs, 8)
    assert layout.numel == sum(spec.numel for spec in specs) == sum(f.numel for f in layout.fragments)
    assert layout.balance == max(f.numel for f in layout.fragments) / (layout.numel / 8)
    assert layout.balance <= 1.1


def test_whole_embeddings_would_unbalance_it() -> None:
    uncut = [replace(spec, embedding_like=False) for spec in llama_specs()]
    assert build_layout(uncut, 8).balance > 1.9


@pytest.mark.parametrize("fragments", [1, 2, 3, 8, 20])
def test_every_row_lies_in_one_fragment(fragments: int) -> None:
    specs = llama_specs()
    layout = build_layout(specs, fragments)
    assert len(layout.fragments) == fragments
    assert all(fragment.pieces for fragment in layout.fragments)
    for spec in specs:
        assert covered(layout, spec.name) == list(range(spec.shape[0]))


def test_other_tensors_stay_whole() -> None:
    layout = build_layout(llama_specs(), 8)
    cut = [p for f in layout.fragments for p in f.pieces if p.name not in layout.embedding_like]
    assert all(piece.start_row == 0 and piece.stop_row == piece.shape[0] for piece in cut)
    assert layout.embedding_like == {"embed_tokens.weight"}


def test_an_embedding_that_fits_stays_whole() -> None:
    specs = [TensorSpec("embed", (10, 2), True), TensorSpec("w", (30,), False), TensorSpec("u", (9,), False)]
    layout = build_layout(specs, 2)
    assert [piece.name for f in layout.fragments for piece in f.pieces] == ["w", "embed", "u"]


def test_input_order_does_not_matter() -> None:
    specs = llama_specs()
    layout = build_layout(specs, 8)
    for seed in range(5):
        shuffled = list(specs)
        random.Random(seed).shuffle(shuffled)
        assert build_layout(shuffled, 8) == layout


def test_hash_tells_layouts_apart() -> None:
    specs = llama_specs()
    twin = [*specs[:-1], replace(specs[-1], name="other")]
    kind = [replace(specs[0], embedding_like=False), *specs[1:]]
    turned = [replace(s, shape=s.shape[::-1]) if s.name == "layers.0.gate.weight" else s for s in specs]
    layouts = [build_layout(specs, 8), build_layout(specs, 7), build_layout(llama_specs(vocab=1025), 8)]
    layouts += [build_layout(changed, 8) for changed in (twin, kind, turned)]
    assert len({layout.hash for layout in layouts}) == len(layouts)
    assert build_layout(llama_specs(), 8).hash == layouts[0].hash


def test_hash_tells_merge_rules_apart() -> None:
    hashes = {build_layout([TensorSpec("w", (4,), like)], 1).hash for like in (False, True)}
    assert len(hashes) == 2


@pytest.mark.parametrize("fragments", [-1, 0, 21, 1000])
def test_wrong_number_of_fragments_is_refused(fragments: int) -> None:
    with pytest.raises(ValueError, match=rf"1 to 20 .*got {fragments}"):
        build_layout(llama_specs(), fragments)


def test_senseless_tensors_are_refused() -> None:
    w = TensorSpec("w", (2, 2), False)
    with pytest.raises(ValueError, match=r"twice: \['w'\]"):
        build_layout([w, w], 1)
    with pytest.raises(ValueError, match=r"without elements.*'e'"):
        build_layout([w, TensorSpec("e", (0, 3), True)], 1)


@pytest.mark.parametrize("tied", [True, False])
def test_specs_of_a_model(tied: bool) -> None:
    specs = {spec.name: spec for spec in specs_of(Small(tied))}
    heads = set() if tied else {"lm_head.weight"}
    assert set(specs) == {"embed.weight", "hidden.weight", "hidden.bias", "scale"} | heads
    assert {name for name, spec in specs.items() if spec.embedding_like} == {"embed.weight"} | heads
    assert specs["scale"].shape == ()
    assert specs["scale"].numel == 1


def test_the_output_head_of_a_model_that_names_it() -> None:
    class Named(Small):
        def get_output_embeddings(self) -> nn.Module:
            return self.hidden

    like = {spec.name for spec in specs_of(Named(tied=False)) if spec.embedding_like}
    assert like == {"embed.weight", "hidden.weight"}


def test_a_last_linear_of_the_embeddings_shape_is_the_head() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 5))
    like = {spec.name for spec in specs_of(model) if spec.embedding_like}
    assert like == {"0.weight", "3.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_and_scatter_undo_each_other(dtype: torch.dtype) -> None:
    source, target = Small().to(dtype), Small().to(dtype)
    layout = build_layout(specs_of(source), 4)
    assert len(covered(layout, "embed.weight")) == 11
    before = {name: value.clone() for name, value in source.named_parameters()}
    for fragment in layout.fragments:
        flat = gather(fragment, dict(source.named_parameters()))
        assert (flat.dtype, flat.shape) == (torch.float32, (fragment.numel,))
        assert not flat.requires_grad
        scatter_(fragment, flat, dict(target.named_parameters()))
        flat.zero_()
    for name, value in source.named_parameters():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        if value.requires_grad:
            got = dict(target.named_parameters())[name]
            assert got.dtype == dtype
            assert got.requires_grad
            torch.testing.assert_close(got, value, rtol=0, atol=0)


def test_gather_follows_the_pieces_and_reads_strided_tensors() -> None:
    specs = [TensorSpec("e", (5, 2), True), TensorSpec("w", (3, 2), False)]
    layout = build_layout(specs, 2)
    e, w = torch.arange(10.0).reshape(2, 5).T, torch.arange(10.0, 16.0).reshape(3, 2)
    flats = [gather(fragment, {"e": e, "w": w}) for fragment in layout.fragments]
    assert flats[0].tolist() == [0.0, 5.0, *range(10, 16)]
    assert flats[1].tolist() == [1.0, 6.0, 2.0, 7.0, 3.0, 8.0, 4.0, 9.0]


def test_wrong_sizes_are_refused() -> None:
    layout = build_layout([TensorSpec("w", (4, 2), False)], 1)
    fragment = layout.fragments[0]
    with pytest.raises(ValueError, match="shape"):
        pieces_of(fragment, torch.zeros(7))
    with pytest.raises(ValueError, match="shape"):
        scatter_(fragment, torch.zeros(4, 2), {"w": torch.zeros(4, 2)})
    with pytest.raises(ValueError, match=r"w.*\(4, 2\).*\(4, 3\)"):
        gather(fragment, {"w": torch.zeros(4, 3)})
    with pytest.raises(KeyError, match="w"):
        gather(fragment, {})


def test_due_step_offsets_are_spread_over_the_interval() -> None:
    assert [due_step_offset(p, 8, 24) for p in range(8)] == [0, 3, 6, 9, 12, 15, 18, 21]
    assert [due_step_offset(p, 3, 10) for p in range(3)] == [0, 3, 6]
    assert [due_step_offset(p, 4, 2) for p in range(4)] == [0, 0, 1, 1]


def test_table_names_every_piece_and_rule() -> None:
    layout = build_layout(llama_specs(), 8)
    lines = table(layout).splitlines()
    assert len(lines) == 2 + sum(1 + len(fragment.pieces) for fragment in layout.fragments)
    assert sum(" mean  embed_tokens.weight[" in line for line in lines) == 8
    assert sum(" rda " in line for line in lines) == 19
    assert "526,976" in lines[-1]
