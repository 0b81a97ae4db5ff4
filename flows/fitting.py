"""What a configuration asks of a model that the model or its data cannot give, told before anything is computed."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from flows.config import CompressConfig
from lsp_core.decode_checks import check_decoder, check_positions
from tasks import launch as processes
from tasks.decode import settings_of
from tasks.images import ImageOrigin, draw, labels_of, list_images, model_labels
from tasks.models import ModelSource, TokenizerSource, load_tokenizer, resolve_device

Pools = Mapping[str, Sequence[ImageOrigin]]  # images by their role


def check_launch(config: CompressConfig, device: str) -> None:
    """Errors: ``ValueError`` for processes of a training that would have no device, or no sequence of a step."""
    launch, batch = config.training.launch, config.training.batch_sequences
    size = launch.num_processes * launch.num_nodes
    if size > batch:
        raise ValueError(
            f"training.batch_sequences={batch} leaves some of {launch.num_nodes} x {launch.num_processes} processes "
            f"without a sequence: lower training.num_processes x num_nodes to {batch} or less"
        )
    processes.check_launch(launch, device)


def check_objectives(config: CompressConfig, model: ModelSource, skeleton: PreTrainedModel, images: Pools) -> None:
    """Errors: ``ValueError`` for the objective task of a model without a task, or of one without labels to train on."""
    names = [target.name for target in config.targets if target.objective == "task"]
    if not names or model.gives_text:
        return
    if model.task == "encoder":
        raise ValueError(
            f"targets: {model.name} has no head, so there is no task loss for {', '.join(names)}: use objective kl"
        )
    try:
        check_labels("calibration.images", images["calibration"], skeleton)
    except ValueError as error:
        raise ValueError(f"targets: {', '.join(names)} trains on labels: {error}; or use objective kl") from None


def check_labels(setting: str, images: Sequence[ImageOrigin], skeleton: PreTrainedModel | None = None) -> None:
    """Errors: ``ValueError`` if not all images have labels, or not such as the classifier ``skeleton`` knows.

    Of hub datasets, which are not downloaded for it, only what the settings tell.
    """
    unlabelled = [origin for origin in images if origin.path is None and origin.label_field is None]
    if unlabelled:
        raise ValueError(f"{setting}: the images of {unlabelled[0].name} have no labels: name a label_field")
    if any(origin.path is None for origin in images):
        return
    listings = [list_images(origin) for origin in images]
    labels, classes = labels_of(listings, draw(images, listings, take=None, part="all", seed=0))
    if (labels < 0).any():
        bare = [o.name for o, one in zip(images, listings, strict=True) if (one.labels < 0).any()]
        found = f"the images of {bare[0]} have no labels" if bare else "its sources have different classes"
        raise ValueError(f"{setting}: {found}: put the images of each class into a folder of its name")
    if skeleton is not None:
        try:
            model_labels(labels, classes, skeleton.config.id2label)
        except ValueError as error:
            raise ValueError(f"{setting}: {error}") from None


def check_padding(skeleton: PreTrainedModel, tokenizer: TokenizerSource) -> None:
    """Errors: ``ValueError`` where an encoder's config and its tokenizer do not name the same padding token."""
    named, written = getattr(skeleton.config, "pad_token_id", None), load_tokenizer(tokenizer).pad_token_id
    if written is None:
        raise ValueError(
            f"{tokenizer.folder}: the tokenizer has no padding token: name its pad_token in tokenizer_config.json"
        )
    if named != written:
        raise ValueError(
            f"{tokenizer.folder}: config.json has pad_token_id {named}, the tokenizer pads with {written}: padding "
            "would count as content; set both to the same"
        )


def check_decode(config: CompressConfig, model: ModelSource, skeleton: PreTrainedModel) -> None:
    """Errors: ``ValueError`` for what decoding cannot be timed of: a model, a context, a dtype or a device."""
    chosen = config.evaluation.decode
    if not chosen.contexts:
        return
    if model.task != "causal-lm":
        raise ValueError(f"evaluation.decode: {model.name} does not write token by token from its own text: drop it")
    try:
        dtype = str(model.torch_dtype).removeprefix("torch.")
        settings_of("", **chosen.model_dump(), dtype=dtype, device=resolve_device(config.device))
        check_decoder(skeleton)
        for context in chosen.contexts:
            check_positions(skeleton, context)
    except ValueError as error:
        raise ValueError(f"evaluation.decode: {error}") from None
