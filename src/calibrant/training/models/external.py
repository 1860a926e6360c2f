"""Adapters for models of other packages, which then return logits of shape ``(B, K, *S)``."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from calibrant import arguments
from calibrant.extras import optional_package
from calibrant.options import Choice
from calibrant.printable import one_line
from calibrant.training.models.weights import SUFFIXES, load_weights

Task = Literal["sequence", "token", "image", "segmentation"]

_TRANSFORMERS = {
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "image": "AutoModelForImageClassification",
    "segmentation": "AutoModelForSemanticSegmentation",
}


class TransformerOutput(nn.Module):
    """A model of transformers that takes a tensor or a dictionary of tensors and returns logits only.

    Token logits ``(B, L, K)`` become ``(B, K, L)``. Segmentation logits are interpolated to the size of the
    images.
    """

    def __init__(self, network: nn.Module, task: Task) -> None:
        super().__init__()
        self.network, self.task = network, task

    def forward(self, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        if isinstance(inputs, Tensor):
            inputs = {"input_ids" if self.task in ("sequence", "token") else "pixel_values": inputs}
        logits: Tensor = self.network(**inputs, return_dict=True).logits
        if self.task == "token":
            return logits.movedim(-1, 1)
        if self.task == "segmentation":
            size = inputs["pixel_values"].shape[-2:]
            return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
        return logits


def timm_model(
    architecture: str,
    num_classes: int,
    *,
    pretrained: bool = False,
    channels: int | None = None,
    image_size: int | None = None,
    **options: Any,
) -> nn.Module:
    """A model of timm.

    Args:
        architecture: a name of ``timm.list_models()``, with or without a tag of weights after a dot.
        num_classes: K.
        pretrained: start from weights that timm downloads.
        channels: the channels of the images; the option ``in_chans`` has priority.
        image_size: the size of the images, for architectures of a fixed size; the option ``img_size`` has
            priority.
        **options: further options of the architecture.
    """
    timm = _package("timm", "timm:NAME", "timm")
    if not timm.is_model(architecture):
        raise _unknown("timm", architecture, timm.list_models())
    if channels is not None:
        options.setdefault("in_chans", channels)
    described = timm.get_pretrained_cfg(architecture)
    if image_size is not None and described is not None and described.fixed_input_size:
        options.setdefault("img_size", image_size)
    factory = partial(timm.create_model, architecture, pretrained=pretrained, num_classes=num_classes)
    return _built(f"timm:{architecture}", factory, options)


def smp_model(
    architecture: str,
    num_classes: int,
    *,
    encoder_name: str = "resnet34",
    encoder_weights: str | None = None,
    pretrained: bool = False,
    channels: int = 3,
    **options: Any,
) -> nn.Module:
    """A segmentation model of segmentation-models-pytorch.

    Args:
        architecture: a name such as "DeepLabV3" or "Unet", in upper or lower case.
        num_classes: K.
        encoder_name: a name of ``segmentation_models_pytorch.encoders.get_encoder_names()``, or ``tu-`` and
            the name of a timm model.
        encoder_weights: the name of encoder weights to download, or a file of them; see `load_weights`.
        pretrained: the same as encoder_weights "imagenet".
        channels: the channels of the images.
        **options: further options of the architecture.
    """
    package = _package("segmentation_models_pytorch", "smp:NAME", "smp")
    known = {kind.__name__.lower(): kind for kind in package.MODEL_ARCHITECTURES_MAPPING.values()}
    if architecture.lower() not in known:
        raise _unknown("smp", architecture, [kind.__name__ for kind in known.values()])
    kind = known[architecture.lower()]
    encoders = package.encoders.get_encoder_names()
    if encoder_name not in encoders and not encoder_name.startswith("tu-"):
        raise ValueError(f"unknown encoder_name {encoder_name!r}{arguments.nearest(encoder_name, encoders)}")
    if pretrained and encoder_weights is None:
        encoder_weights = "imagenet"
    options.setdefault("in_channels", channels)
    name = f"smp:{kind.__name__}"
    if not encoder_name.startswith("tu-"):
        # Only timm encoders take further options; all others ignore unknown ones without a word.
        accepted = [option for option in inspect.signature(kind).parameters if option != "kwargs"]
        arguments.check_known(name, options, accepted)
    in_file = encoder_weights is not None and Path(encoder_weights).suffix in SUFFIXES
    encoder = {"encoder_name": encoder_name, "encoder_weights": None if in_file else encoder_weights}
    model = _built(name, partial(kind, classes=num_classes, **encoder), options)
    if in_file:
        load_weights(model.get_submodule("encoder"), str(encoder_weights), num_classes)
    return model


def transformers_model(
    source: str,
    num_classes: int,
    *,
    task: Task | None = None,
    pretrained: bool = False,
    config: Mapping[str, Any] | None = None,
    channels: int | None = None,
    image_size: int | None = None,
    vocabulary_size: int | None = None,
) -> TransformerOutput:
    """A model of transformers.

    Args:
        source: a folder with a ``config.json``, the name of a model on the Hugging Face hub, or, for random
            weights, a model type such as "bert".
        num_classes: K.
        task: "sequence", "token", "image" or "segmentation": the thing that gets a label. By default "image"
            if the data have channels, otherwise "sequence".
        pretrained: start from the weights of the source. False draws random weights and needs only the
            configuration.
        config: values that replace those of the configuration.
        channels: the channels of the images.
        image_size: the size of the images, for random weights.
        vocabulary_size: the number of tokens, for random weights.
    """
    transformers = _package("transformers", "hf:NAME", "transformers")
    if task is None:
        task = "sequence" if channels is None else "image"
    kind = getattr(transformers, _TRANSFORMERS[arguments.one_of("task", task, tuple(_TRANSFORMERS))])
    changed = dict(config or {})
    described, stated = _configuration(transformers, source, pretrained)
    of_data = {"num_channels": channels}
    if not pretrained:
        of_data |= {"image_size": image_size, "vocab_size": vocabulary_size}
    for name, value in of_data.items():
        if value is not None and hasattr(described, name):
            changed.setdefault(name, value)
    for name in changed:
        if not hasattr(described, name):
            raise TypeError(
                f"the configuration of hf:{source} has no {name!r}{arguments.nearest(name, vars(described))}"
            )
    # Made anew from the stated values: some defaults are derived from other values.
    described = type(described).from_dict({**stated, **changed})
    described.num_labels = num_classes
    if not pretrained:
        return TransformerOutput(kind.from_config(described), task)
    network, loading = kind.from_pretrained(
        source, config=described, ignore_mismatched_sizes=True, output_loading_info=True
    )
    for name, found, expected in loading["mismatched_keys"]:
        if tuple(found)[1:] != tuple(expected)[1:] or expected[0] != num_classes:
            raise ValueError(
                f"the weights of hf:{source} do not fit its configuration: {name} has shape {tuple(found)}, "
                f"expected {tuple(expected)}"
            )
    return TransformerOutput(network, task)


def self_contained(model: nn.Module, choice: Choice) -> Choice:
    """A choice that builds the same model without the folder or the download of its configuration.

    That is known for models of transformers. Other models, and configurations that are more than JSON values,
    keep their choice.
    """
    if not isinstance(model, TransformerOutput):
        return choice
    described: Any = model.network.config
    known = _package("transformers", "hf:NAME", "transformers").CONFIG_MAPPING
    try:
        stated = vars(known[described.model_type]())
        config = {
            name: value
            for name, value in described.to_dict().items()
            if name in stated and name not in _OF_CLASSES
        }
        json.dumps(config)
    except (KeyError, TypeError, ValueError):
        return choice
    return Choice(f"hf:{described.model_type}", {"task": model.task, "config": config})


_OF_CLASSES = ("id2label", "label2id", "num_labels", "_name_or_path")
"""Values of a configuration that follow from the classes, or say where it came from."""


def _configuration(transformers: Any, source: str, pretrained: bool) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the values that its file states."""
    if not pretrained and not Path(source).is_dir() and source in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(source), {}
    try:
        described = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise OSError(
            f"hf:{source} is neither a folder with a config.json nor a model that can be reached on the "
            f"Hugging Face hub{'' if pretrained else ', nor a type of model that transformers knows'}: "
            f"{one_line(str(error))}"
        ) from error
    return described, type(described).get_config_dict(source)[0]


PREFIXES: dict[str, Callable[..., nn.Module]] = {
    "timm": timm_model,
    "smp": smp_model,
    "hf": transformers_model,
}
"""Functions of (rest of the name, K, options), by the prefix before the colon in a model's name."""


def own_factory(name: str) -> Callable[..., nn.Module]:
    """Import the function ``package.module:factory``, which takes K and options and returns a module.

    >>> import torch
    >>> own_factory("torch.nn:Lineer")
    Traceback (most recent call last):
    ValueError: model 'torch.nn:Lineer': module 'torch.nn' has no 'Lineer' (did you mean 'Linear'?)
    """
    place, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        # A module that exists but lacks another one raises its own error.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        near = arguments.nearest(place, PREFIXES)
        raise ValueError(
            f"model {name!r}: there is no module {error.name!r}{near}; expected "
            f"{', '.join(f'{prefix}:NAME' for prefix in PREFIXES)}, or package.module:factory of a module "
            "that Python finds, for example because its folder is in PYTHONPATH"
        ) from None
    if not attribute or not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        near = arguments.nearest(attribute, public)
        raise ValueError(f"model {name!r}: module {place!r} has no {attribute!r}{near}")
    factory: Callable[..., nn.Module] = getattr(module, attribute)
    if not callable(factory):
        raise TypeError(f"model {name!r} must be a function or a class, got a {type(factory).__name__}")
    return factory


def _package(package: str, models: str, extra: str) -> Any:
    try:
        return optional_package(extra, package, purpose=f"a model {models}")
    except RuntimeError as error:
        # A torchvision built for another torch raises this. timm and smp import it.
        raise ImportError(
            f"models {models} need {package}, which cannot be imported: {one_line(str(error))}; torch and "
            "torchvision must be builds for each other"
        ) from error


def _unknown(prefix: str, architecture: str, known: Iterable[str]) -> ValueError:
    near = arguments.nearest(architecture, known)
    return ValueError(f"unknown model '{prefix}:{architecture}': {prefix} has no {architecture!r}{near}")


def _built(name: str, factory: Callable[..., nn.Module], options: Mapping[str, Any]) -> nn.Module:
    try:
        return factory(**options)
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise TypeError(
            f"{name} cannot be built with {given or 'no options'}: {one_line(str(error))}"
        ) from error
