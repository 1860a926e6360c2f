"""Models by name: networks of the papers, models of other packages, and your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from calibrant import arguments
from calibrant.training.models import cifar_resnet
from calibrant.training.models.densenet import cifar_densenet_40, cifar_densenet_121
from calibrant.training.models.external import PREFIXES, own_factory, self_contained
from calibrant.training.models.mlp import cnn, mlp
from calibrant.training.models.text import text_bag, text_cnn
from calibrant.training.models.weights import load_weights

__all__ = ["MODELS", "PREFIXES", "create_model", "load_weights", "model_factory", "self_contained"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifar-resnet-18": cifar_resnet.cifar_resnet_18,
    "cifar-resnet-32": cifar_resnet.cifar_resnet_32,
    "cifar-resnet-50": cifar_resnet.cifar_resnet_50,
    "cifar-resnet-110": cifar_resnet.cifar_resnet_110,
    "cifar-resnet-110-sd": cifar_resnet.cifar_resnet_110_sd,
    "wide-resnet-26-10": cifar_resnet.wide_resnet,
    "cifar-densenet-40": cifar_densenet_40,
    "cifar-densenet-121": cifar_densenet_121,
    "text-cnn": text_cnn,
    "text-bag": text_bag,
    "mlp": mlp,
    "cnn": cnn,
}
"""The networks of this package: functions of K and keyword options, by name."""


def model_factory(name: str) -> Callable[..., nn.Module]:
    """The function of K and keyword options that builds a model.

    The name is a key of `MODELS`, a key of `PREFIXES` with a name after a colon, or
    ``package.module:factory``.

    >>> list(inspect.signature(model_factory("cnn")).parameters)
    ['num_classes', 'channels', 'width']
    """
    if name in MODELS:
        return MODELS[name]
    prefix, colon, rest = name.partition(":")
    if colon and prefix in PREFIXES:
        return partial(PREFIXES[prefix], rest)
    if colon and prefix:
        return own_factory(name)
    raise ValueError(
        f"{arguments.unknown('model', name, MODELS)}, "
        f"{', '.join(f'{prefix}:NAME' for prefix in PREFIXES)} and package.module:factory"
    )


def create_model(
    name: str,
    num_classes: int,
    about: Mapping[str, Any] = {},
    *,
    weights: str | None = None,
    replace_head: bool = False,
    **options: Any,
) -> nn.Module:
    """Build a model that returns logits ``(B, K, *S)``.

    Args:
        name: the name, see `model_factory`.
        num_classes: K.
        about: facts about the data, such as ``channels``. They fill in the options of the same name that are
            not given.
        weights: a file of initial weights, see `load_weights`.
        replace_head: accept weights for another number of classes, and leave the last layer as it is.
        **options: keyword arguments of the model's function.

    Raises:
        ImportError: the package of the model is not installed.
        TypeError: an option is unknown or missing, or the factory returned no module.
        ValueError: the name is unknown, or the options or weights do not fit.

    >>> create_model("mlp", 10, {"features": 64}, hidden=(32,))
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    arguments.whole_number("num_classes", num_classes)
    factory = model_factory(name)
    named, takes_any = _options(factory)
    if not takes_any:
        arguments.check_known(f"model {name!r}", options, [*named, "weights", "replace_head"])
    given = {option: about[option] for option in named if option in about} | options
    missing = [option for option, required in named.items() if required and option not in given]
    if missing:
        raise TypeError(
            f"model {name!r} needs {', '.join(missing)}: set it as an option, the data do not say it"
        )
    model = factory(num_classes, **given)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {name!r} must be a torch.nn.Module, its factory returned {model!r}")
    if weights is not None:
        load_weights(model, weights, num_classes, replace_head=replace_head)
    return model


def _options(factory: Callable[..., nn.Module]) -> tuple[dict[str, bool], bool]:
    """The options of a factory, each with whether it is required, and whether it takes any others."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except ValueError:
        return {}, True
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # The first parameter is the number of classes, whatever its name.
    named = {each.name: each.default is each.empty for each in parameters[1:] if each.kind in kinds}
    return named, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
