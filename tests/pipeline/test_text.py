"""Prompts become what diffusers' encode_prompt gives, and beyond its 77 tokens keep to stated laws."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from pellucid.core.errors import PellucidError
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder, modern_names
from pellucid.models.clip_config import CLIPTextConfig
from pellucid.models.config import read
from pellucid.pipeline.encoders.text import (
    MAX_CHUNKS,
    Embedding,
    Inversion,
    add_inversions,
    chunks_of,
    encode_pair,
    encode_prompts,
    read_inversion,
    size_ids,
    weigh,
    weighted_runs,
)

CLOSE = 1e-5  # relative, float32
PROMPTS = ["a cat", "A red circle, on 2 squares!", ""]
NEGATIVES = ["a dog", "blur", "noise"]
MERGES = [("c", "a"), ("ca", "t</w>"), ("r", "e"), ("re", "d</w>"), ("b", "i"), ("bi", "g</w>"), ("o", "n</w>")]


def config(tokenizer: Tokenizer, width: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": tokenizer.size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": 12,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "max_position_embeddings": tokenizer.length,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
        **more,
    }


def encoder(name: str, raw: dict[str, Any]) -> tuple[CLIPTextEncoder, Any]:
    """One encoder, ours and transformers', with weights large enough that every word shows."""
    theirs = getattr(transformers, name)(transformers.CLIPTextConfig(**raw)).eval().requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    ours = CLIPTextEncoder(read(CLIPTextConfig, {**raw, "architectures": [name]})).eval().requires_grad_(False)
    ours.load_state_dict(modern_names(theirs.state_dict()))
    return ours, theirs


class Model:
    """The text side of a pipeline: ours, and diffusers' own with the same weights."""

    def __init__(self, folder: Path, xl: bool, **more: Any) -> None:
        torch.manual_seed(0)
        self.tokenizer = Tokenizer.from_merges(MERGES, length=20)
        self.tokenizer.save(folder)
        loaded = transformers.CLIPTokenizer.from_pretrained(folder)
        scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
        first, peer = encoder("CLIPTextModel", config(self.tokenizer, 16))
        if not xl:
            self.encoders, self.tokenizers = (first,), (self.tokenizer,)
            # diffusers 0.42 asks transformers 5 for an attribute that it has no longer.
            object.__setattr__(peer, "text_model", peer)
            self.peer: Any = StableDiffusionPipeline(
                None, peer, loaded, None, scheduler, None, None, requires_safety_checker=False
            )
            return
        (folder / "2").mkdir()
        loaded_2 = transformers.CLIPTokenizer.from_pretrained(folder, pad_token="!")
        loaded_2.save_pretrained(folder / "2")
        second, peer_2 = encoder("CLIPTextModelWithProjection", config(self.tokenizer, 24, hidden_act="gelu", **more))
        self.encoders = (first, second)
        self.tokenizers = (self.tokenizer, Tokenizer.load(folder / "2"))
        self.peer = StableDiffusionXLPipeline(
            None, peer, peer_2, loaded, loaded_2, None, scheduler, add_watermarker=False
        )

    def encode(self, prompts: list[Any], **options: Any) -> Embedding:
        return encode_prompts(self.encoders, self.tokenizers, prompts, **options)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("sd"), xl=False)


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("xl"), xl=True)


@pytest.fixture(params=["sd", "xl"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def near(a: Tensor, b: Tensor, close: float = CLOSE) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= close * float(b.abs().max())


# Equal to diffusers


@pytest.mark.parametrize("skip", [None, 0, 1, 2])
@pytest.mark.parametrize("negatives", [None, NEGATIVES])
def test_stable_diffusion_equals_diffusers(sd: Model, skip: int | None, negatives: list[str] | None) -> None:
    cond, uncond = encode_pair(sd.encoders, sd.tokenizers, PROMPTS, negatives, skip=skip)
    want = sd.peer.encode_prompt(PROMPTS, "cpu", 1, True, negatives, clip_skip=skip)
    assert near(cond.context, want[0])
    assert near(uncond.context, want[1])
    assert cond.pooled is uncond.pooled is None


@pytest.mark.parametrize("skip", [None, 1, 2])
@pytest.mark.parametrize("negatives", [None, NEGATIVES])
@pytest.mark.parametrize("zeros", [True, False])
def test_sdxl_equals_diffusers(xl: Model, skip: int | None, negatives: list[str] | None, zeros: bool) -> None:
    xl.peer.register_to_config(force_zeros_for_empty_prompt=zeros)
    cond, uncond = encode_pair(xl.encoders, xl.tokenizers, PROMPTS, negatives, zero_negative=zeros, skip=skip)
    want = xl.peer.encode_prompt(PROMPTS, device="cpu", negative_prompt=negatives, clip_skip=skip)
    for got, expected in zip((cond.context, uncond.context, cond.pooled, uncond.pooled), want, strict=True):
        assert near(got, expected)
    assert bool((uncond.context == 0).all()) == (zeros and negatives is None)


def test_sdxl_takes_a_text_for_each_encoder(xl: Model) -> None:
    cond, uncond = encode_pair(xl.encoders, xl.tokenizers, [("a cat", "red")], [("big", "a dog")])
    want = xl.peer.encode_prompt(["a cat"], ["red"], device="cpu", negative_prompt=["big"], negative_prompt_2=["a dog"])
    for got, expected in zip((cond.context, uncond.context, cond.pooled, uncond.pooled), want, strict=True):
        assert near(got, expected)


def test_refiner_has_the_second_encoder_alone(xl: Model) -> None:
    got = encode_prompts(xl.encoders[1:], xl.tokenizers[1:], PROMPTS)
    both = xl.encode(PROMPTS)
    assert torch.equal(got.context, both.context[..., 16:])
    assert torch.equal(got.pooled, both.pooled)


def test_dtype_and_device_are_those_asked_for(xl: Model) -> None:
    got = xl.encode(["a cat"], device="cpu", dtype=torch.bfloat16)
    assert got.context.dtype == got.pooled.dtype == torch.bfloat16


# Chunks


def test_a_prompt_that_fits_is_one_chunk(model: Model) -> None:
    """Chunking a short prompt changes nothing, however full its window is."""
    full = " ".join(["cat"] * 18)
    got = model.encode([full])
    assert got.context.shape[1] == 20
    theirs = model.peer.encode_prompt(full, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False)
    assert near(got.context, theirs[0])


def test_long_prompts_are_chunks_side_by_side(model: Model) -> None:
    """19 words do not fit into 18 places: the last is alone in a second chunk."""
    got = model.encode([" ".join(["cat"] * 18 + ["red"])])
    first, second = model.encode([" ".join(["cat"] * 18)]), model.encode(["red"])
    assert near(got.context, torch.cat([first.context, second.context], dim=1))
    assert got.pooled is None or near(got.pooled, first.pooled)


def test_chunks_end_between_words() -> None:
    tokenizer = Tokenizer.from_merges(MERGES, length=10)
    text = "cat " * 6 + "dogs red"  # dogs is four tokens: with six before it, it would straddle the eighth place
    found = chunks_of(tokenizer, text)
    assert [[tokenizer.token(i) for i, _ in chunk] for chunk in found] == [["cat"] * 6, ["d", "o", "g", "s", "red"]]


def test_a_word_longer_than_a_chunk_is_the_one_that_breaks() -> None:
    tokenizer = Tokenizer.from_merges(MERGES, length=10)
    assert [len(chunk) for chunk in chunks_of(tokenizer, "x" * 20)] == [8, 8, 4]


@given(st.text(alphabet="catredbigon x1!,😀é", max_size=150), st.integers(4, 30))
def test_no_token_is_lost_or_moved(text: str, length: int) -> None:
    tokenizer = Tokenizer.from_merges(MERGES, length=length)
    ids = tokenizer.ids(text)
    if len(ids) > (MAX_CHUNKS - 1) * (length - 2) // 2:
        return  # it may need too many chunks: see the test of the limit
    found = chunks_of(tokenizer, text)
    assert [i for chunk in found for i, _ in chunk] == ids
    assert all(len(chunk) <= length - 2 for chunk in found)


def test_a_batch_equals_its_singles_with_empty_chunks(model: Model) -> None:
    long = " ".join(["cat on red"] * 12)
    batch = model.encode([long, "cat", ""])
    assert batch.context.shape[1] == 40
    for row, prompt in enumerate([long, "cat", ""]):
        single = model.encode([prompt], chunks=2)
        assert near(batch.context[row : row + 1], single.context)
        assert batch.pooled is None or near(batch.pooled[row : row + 1], single.pooled)
    assert near(batch.context[1:2, 20:], model.encode([""]).context)


def test_prompt_and_negative_have_one_length(model: Model) -> None:
    long = "cat " * 30
    for prompt, negative in ((long, "red"), ("red", long)):
        cond, uncond = encode_pair(model.encoders, model.tokenizers, [prompt], [negative])
        assert cond.context.shape == uncond.context.shape
        assert cond.context.shape[1] == 40


def test_ten_thousand_characters_give_one_clear_line() -> None:
    tokenizer = Tokenizer.from_merges(MERGES)
    with pytest.raises(PellucidError, match="at most 10 chunks of 75 tokens; got 2500 tokens, 34 chunks") as caught:
        chunks_of(tokenizer, "cat " * 2500)
    assert caught.value.code == "prompt-length"
    assert "\n" not in str(caught.value)
    assert len(chunks_of(tokenizer, "cat " * 750)) == MAX_CHUNKS
    with pytest.raises(PellucidError, match="100000 characters"):
        chunks_of(tokenizer, "a" * 100_001)


def test_the_encoder_compiles_once_for_prompts_of_any_length(sd: Model) -> None:
    counter = CompileCounter()
    compiled: Any = torch.compile(sd.encoders[0], backend=counter, fullgraph=True)
    for prompt in ("a cat", "red", "cat " * 50):
        got = encode_prompts([compiled], sd.tokenizers, [prompt, "dog"])
        assert torch.equal(got.context, sd.encode([prompt, "dog"]).context)
    assert counter.frame_count == 1


# Weights


@pytest.mark.parametrize(
    ("prompt", "runs"),
    [
        ("a cat", [("a cat", 1.0)]),
        ("", []),
        ("a (cat)", [("a ", 1.0), ("cat", 1.1)]),
        ("a [cat] b", [("a ", 1.0), ("cat", 1 / 1.1), (" b", 1.0)]),
        ("a (cat:1.3), b", [("a ", 1.0), ("cat", 1.3), (", b", 1.0)]),
        ("((cat))", [("cat", 1.1 * 1.1)]),
        ("(a (cat:1.5):2)", [("a ", 2.0), ("cat", 3.0)]),
        ("(cat:.5)(dog:0)", [("cat", 0.5), ("dog", 0.0)]),
        ("(cat: 1.2 )", [("cat", 1.2)]),
        (r"\(cat\) \[dog\] \\ \x", [(r"(cat) [dog] \ \x", 1.0)]),
        ("a :) b", [("a :) b", 1.0)]),
        ("ratio 16:9) ]", [("ratio 16:9) ]", 1.0)]),
        ("a (cat", [("a ", 1.0), ("cat", 1.1)]),
        ("(cat:nan)", [("cat:nan", 1.1)]),
        ("(a:1.0) cat", [("a cat", 1.0)]),
        ("()", []),
    ],
)
def test_grammar(prompt: str, runs: list[tuple[str, float]]) -> None:
    got = weighted_runs(prompt)
    assert [text for text, _ in got] == [text for text, _ in runs]
    assert [weight for _, weight in got] == pytest.approx([weight for _, weight in runs])


@given(st.text(alphabet="ab()[]:.1\\ ", max_size=80))
def test_grammar_loses_no_letter(prompt: str) -> None:
    """Whatever the brackets are, they come to weights; only a weight out of range is refused."""
    try:
        runs = weighted_runs(prompt)
    except PellucidError:
        with pytest.raises(PellucidError, match="weight of"):
            weighted_runs(prompt)
        return
    assert [c for text, _ in runs for c in text if c in "ab"] == [c for c in prompt if c in "ab"]
    assert all(0 <= weight <= 10 for _, weight in runs)


@pytest.mark.parametrize("prompt", ["(cat:11)", "(cat:-1)", "(" * 24 + "cat" + ")" * 24 + "(" * 25, "(cat:99999999)"])
def test_weights_out_of_range_are_refused(prompt: str) -> None:
    with pytest.raises(PellucidError, match="must be") as caught:
        weighted_runs(prompt)
    assert caught.value.code == "prompt-weight"


def test_many_brackets_are_refused_quickly() -> None:
    with pytest.raises(PellucidError, match="at most 24 deep"):
        weighted_runs("(a" * 50_000)


def test_brackets_are_text_unless_weighting_is_on(model: Model) -> None:
    plain = model.encode(["a (cat:1.3)"])
    theirs = model.peer.encode_prompt(
        ["a (cat:1.3)"], device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    assert near(plain.context, theirs[0])
    assert not near(model.encode(["a (cat:1.3)"], weighting=True).context, plain.context)


@pytest.mark.parametrize("prompt", ["a cat on red", "(a:1.0) (cat:1.00) on red", r"a cat \(on\) red"])
def test_weights_of_one_change_nothing(model: Model, prompt: str) -> None:
    bare = prompt.replace(":1.00", "").replace(":1.0", "")
    bare = bare.replace("\\", "") if "\\" in bare else bare.replace("(", "").replace(")", "")
    assert torch.equal(model.encode([prompt], weighting=True).context, model.encode([bare]).context)


def test_a_weight_is_a_multiple_with_the_mean_restored(sd: Model) -> None:
    plain = sd.encode(["a cat on red"]).context
    got = sd.encode(["a (cat:1.5) on red"], weighting=True).context
    factors = torch.ones(20)
    factors[2] = 1.5  # BOS, a, cat
    scaled = plain * factors[:, None]
    want = scaled * (plain.mean() / scaled.mean())
    assert near(got, want)
    assert float(got.mean()) == pytest.approx(float(plain.mean()), rel=1e-4)


def test_pooled_is_that_of_the_unweighted_text(xl: Model) -> None:
    got, plain = xl.encode(["a (cat:2)"], weighting=True), xl.encode(["a cat"])
    assert torch.equal(got.pooled, plain.pooled)
    assert not near(got.context, plain.context)


def test_weighted_batch_equals_its_singles(model: Model) -> None:
    prompts = ["a (cat:1.6)", "[red] on", "(big:0) cat"]
    batch = model.encode(prompts, weighting=True)
    for row, prompt in enumerate(prompts):
        assert near(batch.context[row : row + 1], model.encode([prompt], weighting=True).context)


def test_a_mean_near_zero_does_not_blow_up() -> None:
    """After a plain layer norm every token has mean 0 but for rounding; the ratio of two such means is noise."""
    states = torch.nn.functional.layer_norm(torch.randn(2, 8, 16), (16,))
    weights = torch.ones(2, 8)
    weights[:, 3] = 1.5
    got = weigh(states, weights)
    ratio = got[:, 0] / states[:, 0]
    assert bool((ratio > 1 / 1.5 - 1e-6).all())
    assert bool((ratio < 1 + 1e-6).all())
    assert bool(weigh(torch.zeros(2, 8, 16), weights).isfinite().all())


def test_chunks_hold_the_id_and_weight_of_each_token() -> None:
    tokenizer = Tokenizer.from_merges(MERGES, length=10).add("<toy>", 2)
    (chunk,) = chunks_of(tokenizer, "(cat:1.5) <toy>", weighting=True)
    size = tokenizer.size
    got = [(tokenizer.token(i), i, weight) for i, weight in chunk]
    assert got == [("cat", tokenizer.ids("cat")[0], 1.5), ("<toy>", size - 2, 1.0), ("<toy>_1", size - 1, 1.0)]


# Textual inversion


@pytest.mark.parametrize("count", [1, 3])
def test_inversion_equals_diffusers(tmp_path: Path, count: int) -> None:
    model = Model(tmp_path, xl=False)
    vectors = torch.randn(count, 16)
    save_file({"<toy>": vectors}, tmp_path / "learned_embeds.safetensors")
    inversion = read_inversion(tmp_path / "learned_embeds.safetensors")
    assert (inversion.name, inversion.count) == ("<toy>", count)
    before = model.encode(["a <toy> on red"]).context
    encoders, tokenizers = add_inversions(model.encoders, model.tokenizers, [inversion])
    model.peer.load_textual_inversion(str(tmp_path))
    want = model.peer.encode_prompt(["a <toy> on red", "a cat"], "cpu", 1, True, ["<toy>", "big"])
    cond, uncond = encode_pair(encoders, tokenizers, ["a <toy> on red", "a cat"], ["<toy>", "big"])
    assert near(cond.context, want[0])
    assert near(uncond.context, want[1])
    assert torch.equal(model.encode(["a <toy> on red"]).context, before)  # the base is as it was


@pytest.mark.parametrize("eos", ["modern", "legacy"])
def test_sdxl_inversion_equals_diffusers(tmp_path: Path, eos: str) -> None:
    """Under the legacy rule transformers pools the new token, having the highest id; we pool the end of the text."""
    model = Model(tmp_path, xl=True, **({"eos_token_id": 2} if eos == "legacy" else {}))
    held = {"clip_l": torch.randn(2, 16), "clip_g": torch.randn(2, 24)}
    save_file(held, tmp_path / "<toy>.safetensors")
    inversion = read_inversion(tmp_path / "<toy>.safetensors")
    encoders, tokenizers = add_inversions(model.encoders, model.tokenizers, [inversion])
    peer = model.peer
    peer.load_textual_inversion(held["clip_l"], "<toy>", peer.tokenizer, peer.text_encoder)
    peer.load_textual_inversion(held["clip_g"], "<toy>", peer.tokenizer_2, peer.text_encoder_2)
    got = encode_prompts(encoders, tokenizers, ["a <toy> cat", "red"])
    if eos == "legacy":
        theirs = peer.encode_prompt(["a <toy> cat"], device="cpu", do_classifier_free_guidance=False)[2]
        assert not near(got.pooled[:1], theirs)
        peer.text_encoder_2.text_model.eos_token_id = model.tokenizer.eos
    want = peer.encode_prompt(["a <toy> cat", "red"], device="cpu", do_classifier_free_guidance=False)
    assert near(got.context, want[0])
    assert near(got.pooled, want[2])
    assert near(got.pooled[1:], model.encode(["red"]).pooled)


@pytest.mark.parametrize("layout", ["emb_params", "bin", "a1111", "vector"])
def test_layouts_of_files(tmp_path: Path, layout: str) -> None:
    vectors = torch.randn(2, 16)
    if layout == "emb_params":
        save_file({"emb_params": vectors}, tmp_path / "toy.safetensors")
        got = read_inversion(tmp_path / "toy.safetensors")
    elif layout == "bin":
        torch.save({"toy": vectors}, tmp_path / "learned_embeds.bin")
        got = read_inversion(tmp_path)
    elif layout == "a1111":
        held = {
            "string_to_token": {"*": 265},
            "string_to_param": {"*": torch.nn.Parameter(vectors)},
            "name": "toy",
            "step": 9,
        }
        torch.save(held, tmp_path / "other.pt")
        got = read_inversion(tmp_path / "other.pt")
        assert read_inversion(tmp_path / "other.pt", "mine").name == "mine"
    else:
        got = read_inversion({"toy": vectors[0]})
        vectors = vectors[:1]
    assert got.name == "toy"
    assert torch.equal(got.vectors[0], vectors)
    assert not got.vectors[0].requires_grad


def test_two_inversions_share_a_prompt(sd: Model) -> None:
    toys = [Inversion("<a>", (torch.randn(2, 16),)), Inversion("<b>", (torch.randn(1, 16),))]
    encoders, tokenizers = add_inversions(sd.encoders, sd.tokenizers, toys)
    ids = tokenizers[0].ids("<a> <b>")
    assert ids == [sd.tokenizer.size, sd.tokenizer.size + 1, sd.tokenizer.size + 2]
    table = encoders[0].text_model.embeddings.token_embedding.weight
    assert torch.equal(table[ids], torch.cat([toys[0].vectors[0], toys[1].vectors[0]]))


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


def code_file(path: Path) -> Path:
    path.write_bytes(pickle.dumps({"toy": Code()}))
    return path


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PellucidError, match="nothing of it was run"):
        read_inversion(code_file(tmp_path / "toy.pt"))
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"a": torch.zeros(1, 16), "b": torch.zeros(1, 16)}, "keys of a textual inversion .* got a, b"),
        ({"a": torch.full((1, 16), torch.nan)}, "finite numbers"),
        ({"a": torch.zeros(1, 2, 16)}, r"vectors \(count, width\); got \(1, 2, 16\)"),
        ({"a": torch.zeros(76, 16)}, "1 to 75 vectors"),
        ({"a": "text"}, "vectors"),
        ({"emb_params": torch.zeros(1, 16)}, "name of a textual inversion must be given"),
    ],
)
def test_bad_inversions_give_one_line(held: dict[str, Any], words: str) -> None:
    with pytest.raises(PellucidError, match=words):
        read_inversion(held)


def test_a_path_without_an_inversion_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.pt"):
        with pytest.raises(PellucidError, match="textual inversion must be a"):
            read_inversion(path)


def test_wrong_width_names_both(sd: Model, xl: Model) -> None:
    with pytest.raises(PellucidError, match="'toy' must be 16 wide, as the text encoder; got '2 × 20'"):
        add_inversions(sd.encoders, sd.tokenizers, [Inversion("toy", (torch.zeros(2, 20),))])
    with pytest.raises(PellucidError, match="16 and 24 wide, as the text encoders; got '1 × 16'"):
        add_inversions(xl.encoders, xl.tokenizers, [Inversion("toy", (torch.zeros(1, 16),))])
    with pytest.raises(PellucidError, match="as many vectors"):
        add_inversions(xl.encoders, xl.tokenizers, [Inversion("toy", (torch.zeros(1, 16), torch.zeros(2, 24)))])


def test_a_known_word_is_refused(sd: Model) -> None:
    toy = Inversion("<toy>", (torch.zeros(1, 16),))
    with pytest.raises(PellucidError, match="already"):
        add_inversions(sd.encoders, sd.tokenizers, [toy, toy])


def test_a_name_that_holds_the_padding_token_is_refused(xl: Model) -> None:
    """SDXL's second tokenizer pads with `!` and finds it first."""
    with pytest.raises(PellucidError, match="another token is a part of it"):
        add_inversions(xl.encoders, xl.tokenizers, [Inversion("wow!", (torch.zeros(1, 16), torch.zeros(1, 24)))])


# Sizes and bad input


def test_size_ids_are_those_of_diffusers() -> None:
    """diffusers concatenates original_size, crops_coords_top_left and target_size, each (height, width)."""
    assert size_ids((1024, 768), (8, 16), (512, 640)).tolist() == [[1024, 768, 8, 16, 512, 640]]
    assert size_ids((1024, 768)).tolist() == [[1024, 768, 0, 0, 1024, 768]]
    assert size_ids([(1, 2), (3, 4)], (0, 5)).tolist() == [[1, 2, 0, 5, 1, 2], [3, 4, 0, 5, 3, 4]]
    assert size_ids((1024, 768), score=6.0).tolist() == [[1024, 768, 0, 0, 6]]


@pytest.mark.parametrize("bad", [(1,), (1, 2, 3), (), (-1, 2), (float("nan"), 1), [(1, 2), (1, 2, 3)]])
def test_bad_sizes_are_refused(bad: Any) -> None:
    with pytest.raises(PellucidError, match="a height and a width"):
        size_ids(bad)


def test_sizes_of_different_batches_are_refused() -> None:
    with pytest.raises(PellucidError, match="one for all images, or one per image"):
        size_ids([(1, 2)] * 3, [(0, 0)] * 2)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "prompts must be a list"),
        ("a cat", {}, "prompts must be a list"),
        ([None], {}, "prompt must be text"),
        ([None], {"weighting": True}, "prompt must be text"),
        ([("a", "b", "c")], {}, "one per encoder; got 3"),
        (["a"], {"skip": 5}, "clip skip must be an integer from 0 to"),
        (["a"], {"skip": -1}, "clip skip"),
        (["a"], {"skip": 1.5}, "clip skip"),
        (["cat " * 30], {"chunks": 1}, "chunks must be from 2"),
        (["cat"], {"chunks": 11}, "to 10; got 11"),
    ],
)
def test_bad_prompts_give_one_line(model: Model, prompts: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PellucidError, match=words):
        model.encode(prompts, **options)


def test_bad_pairs_give_one_line(sd: Model, xl: Model) -> None:
    with pytest.raises(PellucidError, match="2, one per prompt; got 1"):
        encode_pair(sd.encoders, sd.tokenizers, ["a", "b"], ["c"])
    with pytest.raises(PellucidError, match="each with a tokenizer"):
        encode_prompts(xl.encoders, xl.tokenizers[:1], ["a"])
    with pytest.raises(PellucidError, match="do not belong together"):
        encode_prompts(sd.encoders, [sd.tokenizer.add("<toy>")], ["<toy>"])
