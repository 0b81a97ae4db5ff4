"""The flow from end to end on every kind of model, and what each kind refuses before anything is computed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, BertModel, PreTrainedModel, ViTModel

from flows.compress import compress
from flows.config import CompressConfig
from flows.fitting import check_labels
from flows.plan import plan
from flows.prepared import prepare
from lsp_core.modeling import load_compressed
from storage.grid import load_tokens
from storage.store import Store
from storage.tensors import load_tensors
from tasks.images import find_images
from tests.flows.kinds import BOTH, KINDS, save_bert, sections, tiny, write_data

pytestmark = pytest.mark.usefixtures("prefect_server")

FIGURES = {"bert": "similarity", "t5": "perplexity", "vit": "accuracy", "moe": "perplexity", "llama": "perplexity"}
FIGURES |= {"vit-encoder": "similarity"}
SLOW = ("vit-encoder", "llama")
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in KINDS]
)


@dataclass
class Runs:
    """Models, data, and finished runs, each made when it is first asked for."""

    folder: Path
    tokenizer: Path
    text: dict[str, Path]
    data: dict[str, Path]
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def model(self, kind: str) -> Path:
        path = self.folder / kind / "model"
        if not path.exists():
            KINDS[kind][0](path, self.tokenizer)
        return path

    def config(self, kind: str, folder: Path | None = None, **changes: Any) -> CompressConfig:
        values = sections(kind, self.data, self.text)
        return tiny(self.model(kind), folder or self.folder / kind, values, **changes)

    def report(self, kind: str) -> dict[str, Any]:
        if kind not in self.reports:
            self.reports[kind] = compress(self.config(kind))
        return self.reports[kind]

    def test_set(self, kind: str) -> dict[str, Tensor]:
        """Returns the artifact of the stage "calibrate test"."""
        (key,) = {stage["key"] for stage in self.report(kind)["stages"] if stage["label"] == "calibrate test"}
        store = Store(self.config(kind).store)
        found = store.find("calibrate", key)
        assert found is not None
        if FIGURES[kind] == "accuracy" or kind == "vit-encoder":
            return load_tensors(store.local(found))
        return {"tokens": torch.from_numpy(load_tokens(store.local(found))).long()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_text: dict[str, Path]) -> Runs:
    folder = tmp_path_factory.mktemp("kinds")
    return Runs(folder=folder, tokenizer=tiny_model, text=tiny_text, data=write_data(folder))


@every_kind
def test_every_kind_is_compressed_and_judged_by_its_own_figure(runs: Runs, kind: str) -> None:
    report, config = runs.report(kind), runs.config(kind)
    name = FIGURES[kind]
    assert {stage["state"] for stage in report["stages"]} == {"Completed"}
    assert [result["objective"] for result in report["results"]] == [target.objective for target in config.targets]
    text = (config.output / "report.md").read_text()
    template = {"perplexity": "{:.2f}", "accuracy": "{:.2%}", "similarity": "{:.4f}"}[name]
    for result in report["results"]:
        assert abs(result["realized_ratio"] - 0.3) < 0.02
        assert result["parameters"] < report["dense"]["parameters"]
        assert result["kl_joint"] > 0
        row = next(line for line in text.splitlines() if f" {result['objective']} | {result['epochs']} (best" in line)
        for figure in (name, f"{name}_init", f"{name}_init_uniform"):
            assert template.format(result[figure]) in row
    assert f"{name} {template.format(report['dense'][name])}" in text
    assert ("LSP-T on" in text) == (name != "similarity")


@every_kind
def test_the_checkpoint_gives_the_figure_that_was_measured(runs: Runs, kind: str) -> None:
    report, examples = runs.report(kind), runs.test_set(kind)
    for result in report["results"]:
        model = load_compressed(result["checkpoint"])
        assert sum(p.numel() for p in model.parameters()) == result["parameters"]
        with torch.no_grad():
            # the kernel that multiplies with experts knows no float64
            found = MEASURED[kind](model if kind == "moe" else model.double(), examples, runs.model(kind))
        # float32 against float64: the blocks hand some tens of roundings on, to logits of some tens at most
        assert result[FIGURES[kind]] == pytest.approx(found, rel=1e-4)


def causal_perplexity(model: PreTrainedModel, examples: dict[str, Tensor], _: Path) -> float:
    losses = []
    for window in examples["tokens"]:
        logits = model(input_ids=window[None]).logits[0]
        losses += [-logits[t].log_softmax(-1)[window[t + 1]].item() for t in range(len(window) - 1)]
    return math.exp(math.fsum(losses) / len(losses))


def second_half_perplexity(model: PreTrainedModel, examples: dict[str, Tensor], _: Path) -> float:
    losses = []
    for window in examples["tokens"]:
        given, wanted = window[: len(window) // 2], window[len(window) // 2 :]
        read = torch.cat([torch.tensor([0]), wanted[:-1]])
        logits = model(input_ids=given[None], decoder_input_ids=read[None]).logits[0]
        losses += [-row.log_softmax(-1)[token].item() for row, token in zip(logits, wanted, strict=True)]
    return math.exp(math.fsum(losses) / len(losses))


def image_accuracy(model: PreTrainedModel, examples: dict[str, Tensor], _: Path) -> float:
    logits = model(pixel_values=normalized(examples)).logits
    return (logits.argmax(-1) == examples["labels"]).double().mean().item()


def text_similarity(model: PreTrainedModel, examples: dict[str, Tensor], folder: Path) -> float:
    dense = BertModel.from_pretrained(folder, add_pooling_layer=False).eval().double()
    found = []
    for row in examples["tokens"]:
        ids = row[row != 0][None]
        features = [one(input_ids=ids).last_hidden_state[0].mean(0) for one in (dense, model)]
        found.append(F.cosine_similarity(*features, dim=0).item())
    return math.fsum(found) / len(found)


def image_similarity(model: PreTrainedModel, examples: dict[str, Tensor], folder: Path) -> float:
    dense = ViTModel.from_pretrained(folder, add_pooling_layer=False).eval().double()
    features = [one(pixel_values=normalized(examples)).last_hidden_state.mean(1) for one in (dense, model)]
    return F.cosine_similarity(*features).mean().item()


def normalized(examples: dict[str, Tensor]) -> Tensor:
    return (examples["pixels"].double() / 255 - 0.5) / 0.5  # the ViT processor's own mean and deviation


MEASURED: dict[str, Callable[[PreTrainedModel, dict[str, Tensor], Path], float]] = {
    "llama": causal_perplexity,
    "moe": causal_perplexity,
    "t5": second_half_perplexity,
    "vit": image_accuracy,
    "bert": text_similarity,
    "vit-encoder": image_similarity,
}


@every_kind
def test_a_second_run_computes_nothing_and_a_plan_knows_it(runs: Runs, kind: str) -> None:
    first, config = runs.report(kind), runs.config(kind)
    second = compress(config)
    assert {stage["state"] for stage in second["stages"]} == {"Cached"}
    assert second["results"] == first["results"]
    assert {stage["state"] for stage in plan(config)["stages"]} == {"hit"}


@pytest.mark.parametrize(
    "kind", [kind if kind == "t5" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_plan_of_a_new_store_names_the_stages_of_a_run(runs: Runs, kind: str, tmp_path: Path) -> None:
    planned = plan(runs.config(kind, tmp_path))["stages"]
    assert {stage["state"] for stage in planned} == {"miss", "unknown"}
    assert [stage["label"] for stage in planned] == [stage["label"] for stage in runs.report(kind)["stages"]]
    assert all(stage["peak_bytes"] > 0 for stage in planned if stage["label"].startswith(("train", "evaluate")))


def test_a_masked_language_model_is_an_encoder(runs: Runs) -> None:
    report = runs.report("bert")
    members = {member for unit in report["units"] for member in unit["members"]}
    assert members
    assert all(member.startswith("encoder.layer.") for member in members)
    assert report["left_alone"] == {}
    (result,) = report["results"]
    assert 0.9 < result["similarity_init"] < 1
    # the two classes have no word in common
    assert report["dense"]["transfer"]["topics"]["acc"] == result["transfer"]["topics"]["acc"] == 1.0
    assert "## Transfer accuracy, %" in (runs.config("bert").output / "report.md").read_text()


def test_a_probe_tells_classes_by_their_names(runs: Runs) -> None:
    # trained on ash and elm, tested on elm, ash and fir: what no one taught it is wrong, the rest differs in brightness
    report = runs.report("vit")
    assert report["dense"]["transfer"]["trees"]["acc"] == pytest.approx(2 / 3)
    for result in report["results"]:
        assert result["transfer"]["trees"]["acc"] == pytest.approx(2 / 3)


def test_labels_are_learnt_by_the_task_objective(runs: Runs) -> None:
    kl, task = runs.report("vit")["results"]
    losses = [one["train_loss"] for one in task["history"][1:]]
    assert losses[-1] < losses[0]
    assert {"validation", "validation_loss"} <= set(task["history"][0])  # an accuracy, and the loss beside it
    assert task["history"] != kl["history"]
    better = max(record["validation"] for record in task["history"])
    assert task["history"][task["best_epoch"]]["validation"] == better


def test_next_tokens_are_learnt_by_the_decoder(runs: Runs) -> None:
    kl, task = runs.report("t5")["results"]
    assert task["perplexity"] < min(kl["perplexity"], task["perplexity_init"])
    units = {unit["name"] for unit in runs.report("t5")["units"]}
    assert any(name.startswith("encoder.") for name in units)
    assert any("EncDecAttention" in name for name in units)


def test_experts_are_left_alone_by_name(runs: Runs) -> None:
    report = runs.report("moe")
    alone = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"}
    assert set(report["left_alone"]) == {f"model.layers.0.{name}" for name in alone}
    lines = (runs.config("moe").output / "report.md").read_text().splitlines()
    section = lines[lines.index("## Left alone") :]
    for name in alone:
        assert any(line.startswith(f"- `model.layers.*.{name}` (1): no linear layer") for line in section)


def test_groups_are_tied_as_they_are_listed_and_the_rest_as_it_is_discovered(runs: Runs, tmp_path: Path) -> None:
    discovery = {
        "kv_routing": "output",
        "include": ["*.self_attn.*", "*.1.mlp.*"],
        "exclude": ["*.1.mlp.down_proj"],
        "groups": [{"members": ["*.0.self_attn.[qkv]_proj"], "side": "input"}],
    }
    config = runs.config("llama", tmp_path, discovery=discovery, targets=BOTH[:1])
    report = compress(config)
    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    units = {tuple(sorted(unit["members"])): unit["side"] for unit in report["units"]}
    assert units == {
        tuple(f"{first}.{letter}_proj" for letter in "kqv"): "input",
        (f"{first}.o_proj",): "output",
        (f"{second}.q_proj",): "output",
        tuple(f"{second}.{letter}_proj" for letter in "kv"): "output",
        (f"{second}.o_proj",): "output",
        ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"): "input",
    }
    mlp = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert {name.removesuffix(".weight") for name in report["left_alone"]} == mlp | {"model.layers.1.mlp.down_proj"}
    model = load_compressed(report["results"][0]["checkpoint"])
    ids = AutoTokenizer.from_pretrained(report["results"][0]["checkpoint"])("alpha", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(input_ids=ids).logits).all()
    assert {stage["state"] for stage in plan(config)["stages"]} == {"hit"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bert", "vit", "moe"])
@pytest.mark.parametrize("method", ["fisher", "uniform_rank"])
def test_every_kind_under_the_other_allocations(runs: Runs, kind: str, method: str, tmp_path: Path) -> None:
    config = runs.config(kind, tmp_path, allocation={"sequences": 4, "method": method}, targets=BOTH[:1])
    (result,) = compress(config)["results"]
    assert result["allocation"] == method
    assert abs(result["realized_ratio"] - 0.3) < 0.1
    assert {stage["state"] for stage in plan(config)["stages"]} == {"hit"}
    assert plan(config.model_copy(update={"store": str(tmp_path / "fresh")}))["fits"]


@pytest.mark.slow
def test_an_encoder_decoder_continues_a_prompt(runs: Runs, tmp_path: Path) -> None:
    evaluation = {"text": {"path": runs.text["test"]}, "prompt": "alpha", "prompt_tokens": 3}
    config = runs.config("t5", tmp_path, evaluation=evaluation, targets=BOTH[:1], store=runs.config("t5").store)
    (result,) = compress(config)["results"]
    model = load_compressed(result["checkpoint"])
    tokenizer = AutoTokenizer.from_pretrained(runs.model("t5"))
    ids = tokenizer("alpha", return_tensors="pt")["input_ids"]
    made = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert result["continuation"] == tokenizer.decode(made[0, -3:])


def test_the_grid_may_be_measured_on_other_images_and_grams_gathered_on_fewer(runs: Runs, tmp_path: Path) -> None:
    config = runs.config("vit", tmp_path, targets=BOTH[:1])
    allocation = {"sequences": 4, "images": [{"path": runs.data["others"]}]}
    changed = runs.config("vit", tmp_path, targets=BOTH[:1], allocation=allocation)
    fewer = config.calibration.model_copy(update={"gram_sequences": 3})
    keys = [
        {stage["label"]: stage["key"] for stage in plan(one)["stages"] if stage["key"] is not None}
        for one in (config, changed, config.model_copy(update={"calibration": fewer}))
    ]
    same = keys[0].keys() & keys[1].keys()
    assert {label for label in same if keys[0][label] != keys[1][label]} == {"calibrate allocation"}
    compress(config.model_copy(update={"calibration": fewer, "store": runs.config("vit").store}))
    stages = plan(config.model_copy(update={"calibration": fewer, "store": runs.config("vit").store}))["stages"]
    assert {stage["state"] for stage in stages} == {"hit"}
    gather = {stage["label"]: stage["key"] for stage in stages}["gather"]
    whole = {stage["label"]: stage["key"] for stage in plan(runs.config("vit"))["stages"]}["gather"]
    assert gather != whole


POOL = {"sequences": 12, "sequence_length": 16}
TASK = BOTH[1:]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("bert", {"targets": TASK}, r"targets: .* has no head, so there is no task loss for 0\.3-task: use objective"),
        ("vit-encoder", {"targets": TASK}, "has no head, so there is no task loss"),
        ("vit", {"calibration": "plain", "targets": TASK}, "0.3-task trains on labels: calibration.images: the images"),
        ("vit", {"calibration": "others", "targets": TASK}, "calibration.images: the images' classes .ash, elm"),
        ("vit", {"calibration": "mixed", "targets": TASK}, "calibration.images: its sources have different classes"),
        ("vit", {"evaluation": {"images": "plain"}}, "evaluation.images: the images of .* have no labels: put"),
        ("vit", {"evaluation": {"images": "others"}}, r"evaluation.images: the images' classes \(ash, elm, ...\) are"),
        ("vit", {"evaluation": {}}, "evaluation.images: .* reads images, name some"),
        ("vit", {"calibration": {}}, "calibration.images: .* reads images, name some"),
        ("vit", {"evaluation": {"images": "test-images", "prompt": "a"}}, "evaluation.prompt: .* continues no text"),
        (
            "vit",
            {"evaluation": {"images": "test-images", "text_transfer": True}},
            "evaluation.text_transfer: .* images",
        ),
        ("vit", {"evaluation": {"images": "test-images", "transfer": "plain"}}, "evaluation.transfer.a.train: the im"),
        ("t5", {"calibration": "images"}, "calibration.images: .* reads text: it is for models that read images"),
        ("moe", {"evaluation": {"images": "images"}}, "evaluation.images: .* reads text"),
        ("t5", {"evaluation": {"text_transfer": True}}, "evaluation.text_transfer is for encoders"),
        ("vit", {"task": "causal-lm"}, "model.task=causal-lm: there is no such head for .* a vit: leave model.task at"),
        ("t5", {"task": "image-classification"}, "there is no such head for .*auto, which is seq2seq-lm here"),
        ("bert", {"task": "causal-lm"}, "a BertForMaskedLM, reads the tokens that it predicts: leave .* is encoder"),
    ],
)
def test_what_a_kind_cannot_do_is_refused_before_anything_is_computed(
    runs: Runs, tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    given = {name: given_as(runs.data, name, value) for name, value in changes.items() if name != "task"}
    config = runs.config(kind, tmp_path, **given)
    model = config.model.model_copy(update={"task": changes.get("task", "auto")})
    refused(config.model_copy(update={"model": model}), said)


def given_as(data: dict[str, Path], name: str, value: Any) -> Any:
    """Returns a section of a config, with folders of ``data`` for their names."""
    if name == "calibration":
        pools = {"mixed": ("images", "others")}.get(value, (value,)) if value else ()
        return {**POOL, "images": [{"path": data[pool]} for pool in pools]}
    if name != "evaluation":
        return value
    section = dict(value)
    if "images" in section:
        section["images"] = {"path": data[section["images"]]}
    if "transfer" in section:
        path = {"path": data[section["transfer"]]}
        section["transfer"] = {"a": {"train": path, "test": path}}
    if "text_transfer" in section:
        path = {"path": data["train.jsonl"]}
        section["text_transfer"] = {"a": {"train": path, "test": path}}
    return section


def refused(config: CompressConfig, said: str) -> None:
    for partly in (False, True):
        with pytest.raises(ValueError, match=said) as caught:
            prepare(config, partly=partly)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lacking", [False, True])
def test_padding_that_would_count_as_content_is_refused(runs: Runs, tmp_path: Path, lacking: bool) -> None:
    model = tmp_path / "model"
    save_bert(model, runs.tokenizer, padding=3)
    said = "config.json has pad_token_id 3, the tokenizer pads with 0: padding would count as content"
    if lacking:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = None
        tokenizer.save_pretrained(model)
        said = "the tokenizer has no padding token: name its pad_token"
    config = tiny(model, tmp_path, sections("bert", runs.data, runs.text))
    refused(config, said)
    with pytest.raises(ValueError, match=said):
        compress(config)
    assert not (tmp_path / "store" / "manifest").exists()


def test_an_unlabelled_pool_serves_the_divergence(runs: Runs, tmp_path: Path) -> None:
    pools = [{"path": runs.data["plain"], "cap": 20}, {"path": runs.data["others"]}]
    config = runs.config("vit", tmp_path, calibration={"images": pools, **POOL}, validation={"sequences": 2})
    config = config.model_copy(update={"targets": config.targets[:1]})
    report = compress(config)
    (result,) = report["results"]
    assert report["dense"]["accuracy"] == runs.report("vit")["dense"]["accuracy"]
    assert "validation_loss" not in result["history"][0]  # no accuracy: the divergence itself
    assert 0 <= result["accuracy"] <= 1


def test_hub_images_without_a_label_field_are_known_to_have_no_labels(
    monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    monkeypatch.setattr("tasks.images.commit_of", lambda *_: "0" * 40)
    bare, labelled = (find_images(dataset="some/images", label_field=name) for name in (None, "label"))
    with pytest.raises(ValueError, match=r"setting: the images of some/images .* name a label_field"):
        check_labels("setting", [labelled, bare])
    check_labels("setting", [labelled])  # nothing is downloaded for it
