from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from calibrant.losses import LOSSES
from calibrant.options import Choice, RecipeError
from calibrant.training.recipe import Recipe, shipped_recipes

DIGITS = Recipe.load("digits-lt")


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_read_back(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert recipe.description
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_a_recipe_is_a_file_or_a_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[data]\nname = "digits"\n[model]\nname = "mlp"\nhidden = [4]\n')
    recipe = Recipe.load(path)
    assert recipe.name == "mine"
    assert recipe.model == Choice("mlp", {"hidden": (4,)})
    assert Recipe.load(str(path)) == recipe
    with pytest.raises(RecipeError, match=r"unknown recipe 'digitslt' [(]did you mean 'digits"):
        Recipe.load("digitslt")
    with pytest.raises(RecipeError, match="there is no recipe file"):
        Recipe.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs = 3", r"needs the table \[data\]"),
        ("epochs = ", "Invalid value"),
        ("epoch = 3", r"unknown key 'epoch' \(did you mean 'epochs'\?\)"),
        (
            '[data]\nname = "digit"\n[model]\nname = "mlp"',
            r"unknown data 'digit' \(did you mean 'digits'\?\)",
        ),
        (
            '[data]\nname = "digits"\nheads = 3\n[model]\nname = "mlp"',
            r"no option 'heads' \(did you mean 'head'\?\)",
        ),
        ('[data]\nname = "digits"\n[model]\nname = "mpl"', r"unknown model 'mpl' \(did you mean 'mlp'\?\)"),
        ('[data]\nhead = 3\n[model]\nname = "mlp"', r'\[data\] needs name = "…"'),
        ('data = 3\n[model]\nname = "mlp"', r'\[data\] needs name = "…"'),
    ],
)
def test_a_file_that_cannot_be_followed_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=said) as caught:
        Recipe.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_utf8_is_refused_and_shown() -> None:
    with pytest.raises(
        RecipeError, match=r'stored in UTF-8.*: name = "ph\\udcfc"; rename that file or folder$'
    ):
        replace(DIGITS, name="ph\udcfc")


MARGINS = {key: {"margin": 8.0} for key in ("mbls", "cals-hr", "cals-alm")}  # of digits-lt


# ---- Changes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "where", "value"),
    [
        ("epochs=4", "epochs", 4),
        ("gradient_clip=1", "gradient_clip", 1.0),
        ("drop_last=true", "drop_last", True),
        ("adapt=5", "adapt", "5"),
        ("select=nll-after-temperature", "select", "nll-after-temperature"),
        ("precision=bf16-mixed", "precision", "bf16-mixed"),
        ("description=two words", "description", "two words"),
        ("optimizer.lr=0.05", "optimizer", Choice("adam", {"lr": 0.05})),
        ("optimizer=sgd[lr=1]", "optimizer", Choice("sgd", {"lr": 1.0})),
        ("schedule=cosine", "schedule", Choice("cosine")),
        ("model.hidden=[8, 4]", "model", Choice("mlp", {"hidden": (8, 4)})),
        ("model=timm:resnet18[pretrained=true]", "model", Choice("timm:resnet18", {"pretrained": True})),
        ("loss=cals-alm[margin=6, penalty=p2]", "loss", "cals-alm[margin=6,penalty=p2]"),
        ("losses.cals-alm.margin=5", "losses", MARGINS | {"cals-alm": {"margin": 5}}),
        ("losses.adafocal.bins=20", "losses", MARGINS | {"adafocal": {"bins": 20}}),
    ],
)
def test_changes(change: str, where: str, value: Any) -> None:
    changed = DIGITS.override([change])
    assert getattr(changed, where) == value
    assert type(getattr(changed, where)) is type(value)
    for entry in fields(Recipe):
        if entry.name != where:
            assert getattr(changed, entry.name) == getattr(DIGITS, entry.name)
    assert Recipe.from_toml(changed.to_toml()) == changed


def test_later_changes_build_on_earlier_ones() -> None:
    changed = DIGITS.override(
        ["optimizer=sgd", "optimizer.lr=0.2", "optimizer.momentum=0.5", "epochs=1", "epochs=2"]
    )
    assert changed.optimizer == Choice("sgd", {"lr": 0.2, "momentum": 0.5})
    assert changed.epochs == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("epoch=4", r"^unknown key 'epoch' \(did you mean 'epochs'\?\); known: name, "),
        ("optimiser.lr=1", r"^unknown key 'optimiser' \(did you mean 'optimizer'\?\)"),
        (
            "optimizer.lrr=1",
            r"^optimizer 'adam' has no option 'lrr' \(did you mean 'lr'\?\); its options: lr, ",
        ),
        ("data.imbalanced=1", r"did you mean 'imbalance'\?"),
        ("model.hiden=[3]", r"did you mean 'hidden'\?"),
        ("optimizer=sdg", r"^unknown optimizer 'sdg' \(did you mean 'sgd'\?\)"),
        ("loss=cals-aml", r"^unknown loss 'cals-aml' \(did you mean 'cals-alm'\?\); known: "),
        ("loss=cals-alm[margn=3]", "margn"),
        ("loss=cals-alm[margin=-3]", r"^loss cals-alm\[margin=-3\]: margin"),
        ("losses.ces.x=1", "unknown loss 'ces'"),
        ("epochs", r"^cannot read 'epochs'; expected key=value"),
        ("epochs=four", r"^epochs must be a whole number, got 'four'$"),
        ("epochs=1.5", r"^epochs must be a whole number, got 1.5$"),
        ("epochs=0", r"^epochs must be at least 1, got 0$"),
        ("seed=-1", r"^seed must be at least 0"),
        ("drop_last=1", r"^drop_last must be true or false, got 1$"),
        ("optimizer.lr=fast", r"^optimizer.lr must be a number, got 'fast'$"),
        ("model.hidden=8", r"^model.hidden must be a list, each a whole number, got 8$"),
        ("select=best", r"^select must be one of 'last', 'accuracy'"),
        ("average=1", r"^average must lie in \[0, 1\), got 1.0$"),
        ("accumulate=3", r"^batch_size 32 cannot be cut into accumulate = 3 equal parts$"),
        ("adapt=never", r"^adapt must be 'epoch', a number of batches, or"),
        ("adapt=0", "^adapt must be"),
        ("adapt=1:epoch", "^adapt must start with epoch 0"),
        ("adapt=0:epoch/5:3/5:1", "go on with later ones"),
        ("loss=cals-alm[adapt=never]", "^adapt must be"),
        ("epochs.x=1", r"^cannot set 'epochs.x'; expected epochs=value$"),
        ("losses=1", r"^cannot set 'losses'; expected losses.KEY.option=value$"),
        ("optimizer.lr.x=1", r"^cannot set 'optimizer.lr.x'; expected optimizer.option=value or"),
    ],
)
def test_changes_that_are_refused(change: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        DIGITS.override([change])
    assert "\n" not in str(caught.value)


# ---- Losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", LOSSES)
def test_every_loss_can_be_named(key: str) -> None:
    assert isinstance(replace(DIGITS, loss=key).create_loss(10), LOSSES[key])


def test_brackets_go_before_the_recipes_own_values() -> None:
    assert DIGITS.override(["loss=cals-alm"]).create_loss(10).margin == 8
    assert DIGITS.override(["loss=cals-alm[margin=6]"]).create_loss(10).margin == 6
    assert (
        DIGITS.override(["loss=cals-alm[penalty=p3]"]).create_loss(10, ignore_index=255).ignore_index == 255
    )


def test_none_stands_for_none_in_the_options_of_losses() -> None:
    own = replace(DIGITS, loss="cals-alm", losses={"cals-alm": {"penalty_weight_max": None}})
    for recipe in (own, Recipe.from_toml(own.to_toml()), replace(own, losses={}, loss=str(own.loss_choice))):
        assert recipe.create_loss(10).penalty_weight_max is None
    assert own.override(["loss=cals-alm[penalty_weight_max=20]"]).create_loss(10).penalty_weight_max == 20
    with pytest.raises(
        RecipeError, match=r"^loss cals-alm\[margin=none\]: margin must be a number, got 'none'$"
    ):
        replace(DIGITS, loss="cals-alm[margin=none]")


def test_none_may_be_the_name_of_a_choice() -> None:
    recipe = replace(DIGITS, loss="ada-scale[offset=none,class_counts=none]")
    for each in (recipe, Recipe.from_toml(recipe.to_toml())):
        assert each.create_loss(10).options()["offset"] == "none"
        assert each.create_loss(10).class_counts is None


def test_a_list_of_a_loss_may_have_an_entry_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offsets(LOSSES["ce"]):  # type: ignore[misc]
        def __init__(self, num_classes: int, *, offsets: list[float], limits: list[float]) -> None:
            super().__init__(num_classes)
            self.offsets, self.limits = offsets, limits
            if len(offsets) != num_classes:
                raise ValueError(f"offsets must have {num_classes} entries")

    monkeypatch.setitem(LOSSES, "offsets", Offsets)
    assert replace(DIGITS, loss="offsets[limits=[0,9],offsets=[1,2,3]]").loss.startswith("offsets")
    with pytest.raises(RecipeError, match="class_weight must hold num_classes=3"):
        replace(DIGITS, loss="ce[class_weight=[1,2,-3]]")
    with pytest.raises(RecipeError, match="smoothing"):
        replace(DIGITS, loss="ls[class_weight=[1,2,3],smoothing=7]")


def test_a_loss_is_checked_with_the_classes_of_the_data() -> None:
    recipe = replace(DIGITS, loss="dual-focal[rank=1+2+3]")
    assert recipe.create_loss(4).rank == "1+2+3"
    with pytest.raises(
        RecipeError, match=r"^loss dual-focal\[rank=1\+2\+3\]: rank='1\+2\+3' needs more than 3"
    ):
        recipe.create_loss(3)
    together = replace(DIGITS, losses={"dual-focal": {"rank": 2}}, loss="dual-focal[constant=0.1]")
    with pytest.raises(RecipeError, match=r"constant=0\.1 takes the place of rank=2"):
        together.create_loss(10)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ((0, 0),)),
        (["adapt=100"], ((0, 100),)),
        (["adapt=0:epoch/10:100/20:1"], ((0, 0), (10, 100), (20, 1))),
        (["adapt=100", "loss=cals-alm[adapt=7]"], ((0, 7),)),
        (["adapt=100", "loss=cals-alm[adapt=0:epoch/2:3]"], ((0, 0), (2, 3))),
        (["losses.cals-alm.adapt=5", "loss=cals-alm"], ((0, 5),)),
    ],
)
def test_when_a_loss_adapts(changes: list[str], expected: tuple[tuple[int, int], ...]) -> None:
    assert DIGITS.override(changes).adaptation == expected


def test_recipes_do_not_change() -> None:
    with pytest.raises(AttributeError):
        DIGITS.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("accepted", "refused", "words"),
    [
        (["loss=mbls[margin=4]"], ["loss=mbls[margin=-4]"], "margin must"),
        (["loss=nacl"], ["loss=nacl", "binary=true"], "nacl takes no single logits"),
    ],
)
def test_a_loss_that_was_accepted_is_checked_again_if_anything_differs(
    accepted: list[str], refused: list[str], words: str
) -> None:
    for _ in range(2):
        Recipe.load("digits-lt").override(accepted)
        with pytest.raises(RecipeError, match=words):
            Recipe.load("digits-lt").override(refused)
