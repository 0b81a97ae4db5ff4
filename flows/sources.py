"""Where data comes from: texts and images, on the hub or in local folders."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
