"""Where data comes from, texts and images, on the hub or in local folders, and which sets are drawn from it."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tasks.mixing import apportion


class Section(BaseModel):
    """A part of the configuration: immutable, and no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # it may be a secret


class TextSource(Section):
    """Where text comes from: a hub dataset, or a local file or folder."""

    dataset: str | None = Field(None, description="Dataset id on the hub, for instance Salesforce/wikitext.")
    config: str | None = Field(None, description="Configuration of the hub dataset, for instance wikitext-2-raw-v1.")
    split: str = Field("train", description="Split of the hub dataset.")
    revision: str | None = Field(None, description="Revision of the hub dataset; resolved to a commit and recorded.")
    path: Path | None = Field(None, description="Local .txt, .jsonl or .parquet file, or a folder of such files.")
    format: Literal["text", "chat"] = Field(
        "text", description="chat: conversations, written out by the tokenizer's chat template; no plain text files."
    )
    field: str = Field(
        "text",
        min_length=1,
        description="Field that holds the text (hub datasets, .jsonl, .parquet); of chats, unless given, messages.",
    )
    separator: str = Field(
        "\n\n",
        description="Text put between documents; may be a special token of the tokenizer; of format chat none, unless "
        "given.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_chat(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("format") == "chat":
            return {"field": "messages", "separator": "", **values}
        return values

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.dataset is None) == (self.path is None):
            raise ValueError("give either dataset (hub id) or path (local file or folder), not both and not neither")
        return self


WIKITEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1"}
ZERO_SHOT_TASKS = ("openbookqa", "arc_easy", "winogrande", "hellaswag", "piqa", "mathqa")
CALIBRATION_TEXT = TextSource(**WIKITEXT)


class MixPart(Section):
    """One of several texts to calibrate on."""

    text: TextSource = Field(description="Text of this part.")
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Its sequences are proportional to this among the parts."
    )
    cap: int | None = Field(
        None, ge=1, description="At most this many sequences of it; the other parts give what that cuts off."
    )


class LabelledText(TextSource):
    """Texts with a label each, for the linear probe of a text encoder."""

    label_field: str = Field("label", min_length=1, description="Field that holds the label, a number or a name.")


class ImageSource(Section):
    """Where images come from: a hub dataset, or a local folder."""

    dataset: str | None = Field(None, description="Dataset id on the hub, for instance uoft-cs/cifar100.")
    config: str | None = Field(None, description="Configuration of the hub dataset.")
    split: str = Field("train", description="Split of the hub dataset.")
    revision: str | None = Field(None, description="Revision of the hub dataset; resolved to a commit and recorded.")
    image_field: str = Field("image", min_length=1, description="Field of the hub dataset that holds the image.")
    label_field: str | None = Field(None, description="Field of the hub dataset that holds the label; none: no labels.")
    path: Path | None = Field(
        None, description="Local folder of images; sub-folders, where there are any, are the classes."
    )
    cap: int | None = Field(None, ge=1, description="At most this many images of it, drawn by the seed.")
    classes: tuple[str | int, ...] = Field((), description="Only images of these classes, by name or id; empty: all.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.dataset is None) == (self.path is None):
            raise ValueError("give either dataset (hub id) or path (local folder), not both and not neither")
        return self


class ImageTransfer(Section):
    """Labelled images that a linear probe on the frozen features is fitted and tested on."""

    train: ImageSource = Field(description="Images to fit the probe on.")
    test: ImageSource = Field(description="Images to test it on, of the same classes.")


class TextTransfer(Section):
    """Labelled texts that a linear probe on the frozen features is fitted and tested on."""

    train: LabelledText = Field(description="Texts to fit the probe on.")
    test: LabelledText = Field(description="Texts to test it on, of the same classes.")


class CalibrationConfig(Section):
    """The token blocks that Grams are gathered on and projectors are trained on."""

    text: TextSource = Field(CALIBRATION_TEXT, description="Text to calibrate on.")
    mix: tuple[MixPart, ...] = Field((), description="Several texts to calibrate on, in place of text; empty: text.")
    images: tuple[ImageSource, ...] = Field(
        (), description="Pool of images to calibrate on, for a model that reads images; labels are not needed."
    )
    sequences: int = Field(1024, ge=1, description="Number of sequences, drawn without overlap, or of images.")
    sequence_length: int = Field(2048, ge=2, description="Tokens a sequence, at most the model's positions.")
    gram_sequences: int | None = Field(
        None, ge=1, description="Sequences or images that Grams are gathered on, the first of the draw; none: all."
    )
    seed: int = Field(0, ge=0, description="Seed of the draw.")
    checkpoint_sequences: int = Field(
        128,
        ge=1,
        description="Sequences between two checkpoints of gather and of the dense outputs; no effect on the result.",
    )

    @model_validator(mode="after")
    def _mix_fits(self) -> Self:
        if self.mix:
            if self.text != CALIBRATION_TEXT:
                raise ValueError("give either calibration.text or calibration.mix, not both")
            texts = [part.text for part in self.mix]
            twice = [text for index, text in enumerate(texts) if text in texts[:index]]
            if twice:
                name = twice[0].path or twice[0].dataset
                raise ValueError(f"calibration.mix lists {name} twice: list it once, with the sum of the weights")
            _ = self.shares
        return self

    @property
    def shares(self) -> list[int]:
        """Returns how many sequences each part of the mix gives."""
        return apportion(self.sequences, [part.weight for part in self.mix], [part.cap for part in self.mix])


class ValidationConfig(Section):
    """The held-out token blocks that choose the best epoch; never the test split."""

    text: TextSource | None = Field(
        None, description="Text to validate on; none: held-out sequences of the calibration text."
    )
    images: tuple[ImageSource, ...] = Field(
        (), description="Images to validate on, with labels for the accuracy; empty: held-out images of the pool."
    )
    sequences: int = Field(64, ge=1, description="Number of sequences, or of images.")


class DecodeConfig(Section):
    """How fast the compressed models decode, beside the dense one; a language model's alone."""

    contexts: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        (), description="Contexts, in tokens, at which decoding is timed; none: it is not timed."
    )
    batch: int = Field(1, ge=1, description="Sequences decoded at once.")
    tuned: bool = Field(False, description="Time compiled arms with CUDA graphs as well; a GPU needs minutes for each.")

    @field_validator("contexts")
    @classmethod
    def _no_context_twice(cls, contexts: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(contexts)) < len(contexts):
            raise ValueError("a context is listed twice: list each once")
        return contexts


class TextEvaluationConfig(Section):
    """What a language model is evaluated on."""

    text: TextSource = Field(TextSource(**WIKITEXT, split="test"), description="Test text of the perplexity.")
    max_tokens: int | None = Field(None, ge=2, description="Use at most this many tokens of the test text; none: all.")
    sequence_length: int | None = Field(
        None, ge=2, description="Tokens a window; none: the calibration's sequence length, where there is none 2,048."
    )
    bos: Literal["none", "first", "every_window"] = Field(
        "first",
        description="Where a beginning-of-sequence token goes: nowhere, before the text, or before every window.",
    )
    prompt: str | None = Field(
        None, min_length=1, description="Text that every evaluated model continues, for the eye; none: no text."
    )
    prompt_tokens: int = Field(48, ge=1, description="Tokens that the prompt is continued by, the most likely ones.")
    tasks: tuple[str, ...] = Field(ZERO_SHOT_TASKS, description="lm-eval tasks, zero-shot; empty: perplexity alone.")
    task_folder: Path | None = Field(
        None, description="Folder with local lm-eval task files; they may run code, so name one you trust."
    )
    task_limit: int | None = Field(None, ge=1, description="Use at most this many examples a task; none: all.")
    task_batch_size: int = Field(8, ge=1, description="Batch size of the lm-eval tasks.")

    @field_validator("tasks")
    @classmethod
    def _no_task_twice(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        refuse_twice("tasks", list(tasks))
        return tasks


class EvaluationConfig(TextEvaluationConfig):
    """What the dense and the compressed models are compared on."""

    images: ImageSource | None = Field(
        None, description="Labelled test images of an image classifier's own classes; none: no accuracy."
    )
    transfer: dict[str, ImageTransfer] = Field(
        {}, description="Sets of other images, by a name, for linear probes on the frozen features."
    )
    text_transfer: dict[str, TextTransfer] = Field(
        {}, description="Sets of labelled texts, by a name, for linear probes on a text encoder's features."
    )
    device_gib: float = Field(
        95.5, gt=0, description="Memory of the device for which a language model's longest context is stated."
    )
    decode: DecodeConfig = Field(DecodeConfig(), description="Speed of decoding.")


def refuse_twice(what: str, names: list[str]) -> None:
    """Errors: ``ValueError`` naming what is in ``names`` more than once."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} listed twice: {', '.join(twice)}")
