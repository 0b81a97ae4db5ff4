"""Model cards: true figures, the base model's licence, snippets that run, and the same bytes again."""

import copy
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from flows.cli import main
from lsp_core.discovery import discover_units
from lsp_core.merging import merge_model
from lsp_core.modeling import load_compressed, save_compressed
from tasks import card
from tasks.card import base_name, holds_latents, render, write_card
from tasks.models import ModelSource, find_model, load_model, load_tokenizer
from tasks.processors import copy_processor
from tests.flows.kinds import save_bert, save_vit

REPOSITORY = Path(__file__).parents[2]
LICENCE = "Permission is granted.\n"
HUB_CARD = "---\nlicense: apache-2.0\ntags: [text]\n---\n\n# A model\n"
PATHS = sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})
Make = Callable[..., tuple[Path, dict[str, Any], dict[str, Any]]]


def save_merged(source: ModelSource, folder: Path, dense: int = 2) -> list[Any]:
    """Merges all but the first ``dense`` units of a model by random vectors and saves it; returns all units."""
    model = load_model(source)
    units = discover_units(model)
    generator = torch.Generator().manual_seed(0)
    vectors = {u.name: torch.randn(u.dimension, u.dimension // 2, generator=generator) for u in units[dense:]}
    merge_model(model, units, vectors)
    save_compressed(model, units, folder)
    if source.processor is None:
        load_tokenizer(source.own_tokenizer).save_pretrained(folder)
    else:
        copy_processor(source.processor, folder)
    return units


def report_of(units: list[Any], metric: str = "perplexity", **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a report, and the only result in it, whose figures all differ."""
    result = {
        "ratio": 0.3,
        "objective": "kl",
        "allocation": "measured_kl",
        "realized_ratio": 0.3127,
        "kl_sum_of_isolated": 0.25,
        "kl_joint": 0.3125,
        f"{metric}_init": 0.41,
        f"{metric}_init_uniform": 0.32,
        metric: 0.53,
        "epochs": 4,
        "best_epoch": 2,
    } | changes
    named = [
        {"name": unit.name, "side": unit.side, "members": list(unit.members), "dimension": unit.dimension}
        for unit in units
    ]
    counted = {"perplexity": "tokens"}.get(metric, "examples")
    dense = {metric: 0.64, "parameters": 34_016, counted: 4096}
    return {"dense": dense, "units": named, "results": [result]}, result


@pytest.fixture
def make(source: ModelSource, tmp_path: Path) -> Make:
    """Returns a function that writes the card of a compressed tiny Llama; ``changes`` are to its result."""

    def write(model: ModelSource = source, dense: Any = None, **changes: Any) -> tuple[Path, dict[str, Any], Any]:
        folder = tmp_path / "0.3-kl"
        units = save_merged(source, folder)
        report, result = report_of(units, **changes)
        report["dense"] |= dense or {}
        calibration = {"amount": "16 sequences of 32 tokens", "digest": "c0ffee"}
        write_card(folder, model=model, report=report, result=result, calibration=calibration)
        return folder, json.loads((folder / "card.json").read_text()), result

    return write


def parts_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the front matter and the text of a card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def rows_of(text: str, title: str) -> list[list[str]]:
    """Returns the cells of the table under ``title``, without its header."""
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_sizes_are_those_of_the_files(make: Make, source: ModelSource) -> None:
    folder, facts, _ = make()
    tensors = load_file(folder / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    assert parameters == load_compressed(folder).num_parameters() < 34_016
    assert facts["compressed"] == {"parameters": parameters, "bytes": 4 * parameters, "dtypes": ["float32"]}
    assert facts["dense"] == {"parameters": 34_016, "bytes": 4 * 34_016, "dtype": "float32"}
    assert load_model(source).num_parameters() == 34_016
    assert rows_of(parts_of(folder)[1], "Size") == [
        ["dense", "34,016", "136,064", "float32"],
        ["this checkpoint", f"{parameters:,}", f"{4 * parameters:,}", "float32"],
    ]


def test_ranks_are_those_of_the_weights(make: Make) -> None:
    folder, facts, _ = make()
    model = load_compressed(folder)
    _, text = parts_of(folder)
    rows = rows_of(text, "Ranks")
    assert len(rows) == len(facts["units"]) == 8
    for unit, (name, side, rank, dimension, _) in zip(facts["units"], rows, strict=True):
        layer = model.model.get_submodule(unit["members"][0])
        assert (name, side, dimension) == (f"`{unit['name']}`", unit["side"], str(unit["dimension"]))
        if unit["dense"]:
            assert (rank, type(layer)) == ("dense", torch.nn.Linear)
        else:
            assert int(rank) == unit["rank"] == layer.ranks[unit["side"]] < unit["dimension"]
    dense = [unit["name"] for unit in facts["units"] if unit["dense"]]
    assert len(dense) == 2
    assert f"6 of 8 units are factored; dense are `{dense[0]}`, `{dense[1]}`." in text


def test_figures_are_the_report_s(make: Make) -> None:
    tasks = {"easy": {"acc": 0.5, "acc_norm": 0.25}, "written": {"exact_match": 0.125}}
    worse = {"easy": {"acc": 0.375}, "written": {"exact_match": 0.0}}
    folder, facts, result = make(dense={"tasks": tasks}, tasks_init=worse, tasks=tasks, objective="task")
    assert facts["figures"] == {"dense": 0.64, "trained": 0.53, "untrained": 0.41, "untrained_uniform": 0.32}
    assert facts["accuracies"]["tasks"] == {"dense": tasks, "untrained": worse, "trained": tasks}
    assert {name: facts[name] for name in ("kl_joint", "kl_sum_of_isolated", "realized_ratio", "epochs")} == {
        name: result[name] for name in ("kl_joint", "kl_sum_of_isolated", "realized_ratio", "epochs")
    }
    _, text = parts_of(folder)
    assert rows_of(text, "Quality") == [
        ["dense", "0.64", "50.0%", ""],  # a task without an accuracy has none here
        ["NoLSP, uniform ranks", "0.32", "", ""],
        ["NoLSP", "0.41", "37.5%", ""],
        ["LSP-T", "0.53", "50.0%", ""],
    ]
    words = " ".join(text.split())
    assert "compressed by 31.27%" in words
    assert "on 4,096 test tokens" in words
    assert "0.312 nats per token; cut alone, its units do so by 0.250 in sum." in words
    assert "| objective `task`, 4 epochs; kept: epoch 2 |" in words
    assert "| 16 sequences of 32 tokens, with digest `c0ffee` |" in words
    assert "| ranks chosen by | `measured_kl` |" in words


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"ratio": 0.3}, "30.00%"),
        ({"ratio": 0.2718, "fit_gib": 2.5}, "weights of at most 2.5 GiB, hence 27.18%"),
        ({"ratio": 0.3127, "max_kl": 0.1}, "at most 0.1 nats of divergence before training"),
    ],
)
def test_what_was_asked_for(make: Make, target: dict[str, Any], said: str) -> None:
    folder, facts, _ = make(**target)
    assert facts["target"] == {**target, "objective": "kl"}
    assert f"| to remove | {said} |\n| removed | 31.27% |\n" in parts_of(folder)[1]


def test_what_was_not_measured_is_not_stated(make: Make) -> None:
    folder, facts, _ = make(kl_sum_of_isolated=None, best_epoch=0, allocation="uniform_rank")
    _, text = parts_of(folder)
    assert facts["kl_sum_of_isolated"] is None
    assert "0.312 nats per token.\n" in text
    assert "kept: the untrained factors" in text
    assert "None" not in text


def test_the_front_matter_is_the_hub_s(make: Make, source: ModelSource) -> None:
    folder, _, _ = make()
    front, text = parts_of(folder)
    assert front == {
        "base_model": Path(source.folder).name,
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lsp", "compression"],
    }
    assert "The licence of the base model is unknown" in text


def test_a_model_of_the_hub_is_named_by_its_id_and_commit(make: Make, source: ModelSource) -> None:
    hub = source.model_copy(update={"name": "owner/name", "revision": "a" * 40})
    folder, facts, _ = make(hub)
    front, text = parts_of(folder)
    assert front["base_model"] == facts["base_model"]["name"] == base_name(hub) == "owner/name"
    assert f"| its revision | commit {'a' * 40} |" in text
    assert f"| its digest | `{source.digest}` |" in text


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("hub/models--owner--a-model/snapshots/0123abc", "owner/a-model"),
        ("hub/models--gpt2/snapshots/0123abc", "gpt2"),
        ("snapshots/0123abc", "0123abc"),
        ("here/my-model", "my-model"),
    ],
)
def test_a_folder_of_the_hub_s_cache_is_named_by_its_id(source: ModelSource, folder: str, name: str) -> None:
    assert base_name(source.model_copy(update={"folder": f"/a/{folder}", "revision": None})) == name


def test_the_cache_of_latents_is_shown_where_it_would_hold_some(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, facts, _ = make()
    assert facts["latents_of_keys_and_values"]
    assert "LatentCache(model)" in parts_of(folder)[1]
    config = json.loads((folder / "config.json").read_text())
    wide = copy.deepcopy(config)
    for unit in wide["units"]:
        unit["roles"] = ["" for _ in unit["members"]]
    (folder / "config.json").write_text(json.dumps(wide))
    assert not holds_latents(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert holds_latents(folder)

    def refuse(_model: object) -> None:
        raise ValueError("use the ordinary cache")

    monkeypatch.setattr(card, "LatentCache", refuse)
    assert not holds_latents(folder)


def test_adapters_reach_the_factors_as_the_card_says(make: Make) -> None:
    folder, _, _ = make()
    targets = re.findall(r'target_modules="([^"]*)"', parts_of(folder)[1])
    assert targets == ["all-linear"]
    model = get_peft_model(load_compressed(folder), LoraConfig(r=2, target_modules=targets[0]))
    assert any("input_factor.linear.lora_A" in name for name, _ in model.named_parameters())


def test_the_same_artifacts_give_the_same_bytes_without_a_path(make: Make, source: ModelSource, tmp_path: Path) -> None:
    files = []
    for _ in range(2):
        folder, _, _ = make(source.model_copy(update={"name": source.folder}))
        files.append([(folder / name).read_bytes() for name in ("README.md", "card.json")])
    assert files[0] == files[1]
    for content in files[0]:
        assert str(Path(source.folder).parent).encode() not in content
        assert str(tmp_path).encode() not in content


def test_a_name_of_any_kind_is_one_string(make: Make) -> None:
    _, facts, _ = make()
    facts = copy.deepcopy(facts)
    facts["base_model"]["name"] = "no: [model] #1"
    assert yaml.safe_load(render(facts).split("---\n")[1])["base_model"] == "no: [model] #1"


@pytest.mark.parametrize(
    ("card", "file", "front", "said"),
    [
        (HUB_CARD, True, {"license": "apache-2.0"}, "apache-2.0, as its card says"),
        (
            HUB_CARD.replace("apache-2.0", "[mit, bsd]"),
            False,
            {"license": ["mit", "bsd"]},
            "mit, bsd, as its card says",
        ),
        (
            HUB_CARD.replace("apache-2.0", "other\nlicense_name: own\nlicense_link: LICENSE"),
            True,
            {"license": "other", "license_name": "own", "license_link": "LICENSE"},
            "[own](LICENSE), as its card says",
        ),
        ("# no front matter\nlicense: mit\n", True, {"license": "other", "license_link": "LICENSE"}, "see [LICENSE]"),
        ("---\nlicense: mit\n", True, {"license": "other", "license_link": "LICENSE"}, "see [LICENSE]"),
        (None, True, {"license": "other", "license_link": "LICENSE"}, "see [LICENSE](LICENSE)."),
        ("---\ntags: [text]\n---\n", False, {"license": "unknown"}, "is unknown"),
        (None, False, {"license": "unknown"}, "is unknown"),
    ],
)
def test_the_licence_is_the_base_model_s(
    make: Make, source: ModelSource, tmp_path: Path, card: str | None, file: bool, front: dict[str, Any], said: str
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    if card is not None:
        (base / "README.md").write_text(card)
    if file:
        (base / "LICENSE").write_text(LICENCE)
    folder, facts, _ = make(source.model_copy(update={"folder": str(base)}))
    written, text = parts_of(folder)
    assert {name: value for name, value in written.items() if name.startswith("license")} == front
    assert {name: value for name, value in facts["base_model"]["license"].items() if name != "stated_by"} == front
    assert said in text.split("\n## Licence\n")[1]
    assert (folder / "LICENSE").exists() == file
    assert not file or (folder / "LICENSE").read_text() == LICENCE


def test_a_notice_alone_is_no_licence(make: Make, source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "NOTICE").write_text("of others")
    folder, _, _ = make(source.model_copy(update={"folder": str(tmp_path / "base")}))
    assert parts_of(folder)[0]["license"] == "unknown"
    assert (folder / "NOTICE").read_text() == "of others"


def test_what_others_wrote_is_text_and_no_markdown(make: Make, source: ModelSource, tmp_path: Path) -> None:
    """Rendered as Markdown, the names are shown as they are, and every link leads where the licence says."""
    base = tmp_path / "a`b|c[d](http:evil)_e_<script>"
    base.mkdir()
    name = "own](http:evil) *x* <b>|"
    link = "https://a.org/x) [y](http:evil)"
    front = yaml.safe_dump({"license": "other", "license_name": name, "license_link": link})
    (base / "README.md").write_text(f"---\n{front}---\n")
    folder, _, _ = make(source.model_copy(update={"folder": str(base)}))
    written, text = parts_of(folder)
    assert (written["base_model"], written["license_name"], written["license_link"]) == (base.name, name, link)
    shown = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [token for token in shown if token.type == "inline"]
    children = [child for token in inline for child in token.children or []]
    links = [child.attrs["href"] for child in children if child.type == "link_open"]
    assert links == ["https://a.org/x%29%20%5By%5D%28http:evil%29"]
    assert not [token for token in (*shown, *children) if token.type.startswith("html")]
    texts = ["".join(child.content for child in token.children or []) for token in inline]
    assert texts[0] == f"{base.name}, compressed by 31.27%"
    assert f"That of the base model: {name}, as its card says." in texts
    codes = [child.content for child in children if child.type == "code_inline"]
    assert codes.count(base.name) == 1  # in the table
    assert "a`b\\|c" in codes[0]


def snippets_of(folder: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)


def run(script: str, folder: Path, *, own: bool) -> str:
    """Runs ``script`` where lsp_core can be imported, its ``own`` home, or where it cannot; returns what it printed."""
    environment = os.environ | {"HF_MODULES_CACHE": str(folder.parent / "modules"), "HF_HUB_OFFLINE": "1"}
    options, head = [], "import torch\ntorch.set_num_threads(1)\n"
    if own:
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
    else:
        environment.pop("PYTHONPATH", None)
        options = ["-S"]
        head = f"import sys\nsys.path += {PATHS}\nfrom importlib.util import find_spec\n{head}"
        head += "assert find_spec('lsp_core') is None\n"
    command = [sys.executable, *options, "-c", head + script]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippets_run(make: Make) -> None:
    folder, facts, _ = make()
    ours, remote, generate, latents = snippets_of(folder)
    assert facts["latents_of_keys_and_values"]
    here = run(ours + generate + latents, folder, own=True)
    there = run(remote + generate, folder, own=False)
    assert there
    assert here == 2 * there  # the cache of latents gives the same tokens
    (shell,) = re.findall(r"```bash\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    python, module, flows, *arguments = shell.replace("PATH/TO/THIS/FOLDER", str(folder)).split()
    assert (python, module, flows) == ("python", "-m", "flows")
    assert main(arguments) == 0
    assert (folder.parent / "0.3-kl-dense" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "metric"), [("classifier", "accuracy"), ("bert", "similarity")])
def test_models_without_text_load_as_their_cards_say(kind: str, metric: str, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "0.3-kl"
    (save_vit if kind == "classifier" else save_bert)(base, base)
    source = find_model(str(base), task="encoder" if kind == "bert" else "auto")
    transfer = {"pets": {"acc": 0.5, "converged": True}}
    units = save_merged(source, folder)
    report, result = report_of(units, metric, transfer=transfer, transfer_init=transfer)
    report["dense"]["transfer"] = transfer
    write_card(folder, model=source, report=report, result=result, calibration={"amount": "9 images", "digest": "c0"})
    front, text = parts_of(folder)
    assert front["pipeline_tag"] == {"classifier": "image-classification", "bert": "feature-extraction"}[kind]
    assert [row[0] for row in rows_of(text, "Quality")] == ["dense", "NoLSP, uniform ranks", "NoLSP", "LSP"]
    assert rows_of(text, "Quality")[3][1:] == ["53.00%" if kind == "classifier" else "0.5300", "50.0%"]
    ours, remote = snippets_of(folder)
    reader = {"classifier": "processor", "bert": "tokenizer"}[kind]
    shown = f"print(type(model).__name__, type({reader}).__name__)\n"
    expected = {"classifier": "LSPForImageClassification", "bert": "LSPModel"}[kind]
    assert run(ours + shown, folder, own=True).split()[0] == expected
    assert run(remote + shown, folder, own=False).split()[0] == expected
