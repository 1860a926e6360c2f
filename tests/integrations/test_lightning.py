"""Lightning with the callback gives the results of a plain loop with `adapt_on`, and nothing else changes."""

import warnings
from types import SimpleNamespace

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import calibrant
from calibrant.integrations import lightning as integration
from calibrant.integrations.lightning import Calibration
from calibrant.integrations.torchmetrics import CalibrationError
from calibrant.losses import AdaptationWarning, AdaptiveLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
ADAPTIVE = [key for key, loss in calibrant.LOSSES.items() if issubclass(loss, AdaptiveLoss)]
CLASSES, FEATURES, BATCH, EPOCHS = 4, 6, 8, 2
TOO_LATE = "adapted only after the last training step"


def labelled(count, seed, scale=20.0):
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


TRAIN, VALIDATION, OTHER = labelled(32, 1), labelled(21, 2), labelled(13, 3, 5.0)


def loader(data, **options):
    return DataLoader(data, BATCH, **options)


def network():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def module(key="cals-alm", pl=lightning.pytorch, **overrides):
    """A typical LightningModule; ``overrides`` are methods and attributes."""

    def training_step(self, batch):
        return self.loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx=0, dataloader_idx=0):
        self.log("val/loss", self.loss(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    methods = {
        "training_step": training_step,
        "validation_step": validation_step,
        "test_step": validation_step,
        "configure_optimizers": configure_optimizers,
        **{name: value for name, value in overrides.items() if not isinstance(value, nn.Module)},
    }
    made = type("Classifier", (pl.LightningModule,), methods)()
    made.network = network()
    if key is not None:
        made.loss = calibrant.create_loss(key, CLASSES)
    for name, value in overrides.items():
        if isinstance(value, nn.Module):
            setattr(made, name, value)
    return made


def trainer(callback=None, pl=lightning.pytorch, callbacks=(), **options):
    settings = {
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,  # the first tests have the sanity check of Lightning's default
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return pl.Trainer(callbacks=[Calibration() if callback is None else callback, *callbacks], **settings)


def fit(made, callback=None, validation=None, *, train=None, pl=lightning.pytorch, ckpt_path=None, **options):
    run = trainer(callback, pl, **options)
    train = loader(TRAIN) if train is None else train
    validation = loader(VALIDATION) if validation is None else validation
    run.fit(made, train, validation, ckpt_path=ckpt_path)
    return run


def plain_loop(key="cals-alm", *, every=None, data=VALIDATION, epochs=EPOCHS):
    """The expected result: a plain loop that adapts after a number of steps, or after the epoch."""
    model, loss = network(), calibrant.create_loss(key, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    every = len(loader(TRAIN)) if every is None else every
    for _ in range(epochs):
        for number, (inputs, target) in enumerate(loader(TRAIN), start=1):
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
            if number % every == 0:
                calibrant.adapt_on(loss, model, loader(data))
    return nn.ModuleDict({"network": model, "loss": loss}).state_dict()


def state(made):
    return {name: value.clone() for name, value in made.state_dict().items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def moved(found, key="cals-alm"):
    fresh = calibrant.create_loss(key, CLASSES).state_dict(prefix="loss.")
    return {name for name in fresh if not torch.equal(found[name], fresh[name])}


class Note(lightning.pytorch.Callback):
    """Records something at a hook."""

    def __init__(self, hook, look):
        self.found = []
        setattr(self, hook, lambda run, made, *_: self.found.append(look(run, made)))


def assert_clean(made):
    """Assert that no hook and no sums are left."""
    assert not made.loss._forward_hooks
    assert getattr(made.loss, "_observed", None) is None


# ------------------------------------------------------------------------------ equal to the plain loop


@pytest.mark.parametrize("key", ADAPTIVE)
def test_equals_the_plain_loop(key):
    expected = plain_loop(key)
    assert "loss.passes" in moved(expected, key)
    assert len(moved(expected, key)) > 1
    made = module(key)
    fit(made, num_sanity_val_steps=2)
    assert_equal(state(made), expected)
    assert_clean(made)


@pytest.mark.parametrize("options", [{"inference_mode": False, "num_sanity_val_steps": 2}, {}], ids=str)
@pytest.mark.parametrize("pl", PACKAGES.values(), ids=PACKAGES)
def test_both_packages_and_modes(pl, options):
    made = module(pl=pl)
    fit(made, pl=pl, **options)
    assert_equal(state(made), plain_loop())


def test_every_validation_run_of_an_epoch_adapts():
    made = module()
    fit(made, val_check_interval=2)
    assert made.loss.passes == 2 * EPOCHS
    assert_equal(state(made), plain_loop(every=2))


def test_the_sanity_check_is_not_counted():
    seen = Note(
        "on_sanity_check_end", lambda run, made: (state(made), made.loss._observed, run.callback_metrics)
    )
    made = module()
    fresh = state(made)
    fit(made, callbacks=[seen], num_sanity_val_steps=2)
    ((then, observed, logged),) = seen.found
    assert_equal(then, fresh)
    assert observed is None
    assert not any(name.startswith(("loss/", "val/ece")) for name in logged)


def test_outside_of_fit_nothing_is_learned():
    made = module()
    fit(made)
    fitted = state(made)
    validated = trainer().validate(made, loader(OTHER), verbose=False)
    tested = trainer().test(made, loader(OTHER), verbose=False)
    assert_equal(state(made), fitted)
    assert_clean(made)
    expected = calibrant.evaluate_on(made.network, loader(OTHER), resamples=0)
    for (figures,), stage in ((validated, "val"), (tested, "test")):
        assert figures[f"{stage}/nll"] == pytest.approx(expected.nll)
        assert figures[f"{stage}/ece"] == pytest.approx(expected.ece)
        assert figures[f"{stage}/classwise_ece"] == pytest.approx(expected.classwise_ece)
        assert not any(name.startswith("loss/") for name in figures)


def test_the_fitted_trainer_validates_and_tests_without_learning():
    made = module()
    run = fit(made)
    fitted = state(made)
    (validated,) = run.validate(made, loader(OTHER), verbose=False)
    (tested,) = run.test(made, loader(OTHER), verbose=False)
    assert_equal(state(made), fitted)
    assert validated["val/ece"] == tested["test/ece"]


def test_a_loss_that_does_not_adapt_is_only_measured():
    made = module("ce")
    run = fit(made)  # without a warning, as in the other integrations
    assert {name for name in run.callback_metrics if name != "val/loss"} == {
        "val/nll",
        "val/ece",
        "val/adaptive_ece",
        "val/classwise_ece",
    }
    assert_clean(made)


def test_sums_from_elsewhere_do_not_count():
    made = module()
    made.loss.observe(10 * torch.eye(CLASSES), torch.zeros(CLASSES, dtype=torch.long))
    fit(made)
    assert_equal(state(made), plain_loop())


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_of_a_validation_run_holds_what_it_taught(tmp_path):
    keeper = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, "{epoch}", monitor="val/ece", save_top_k=-1, save_on_train_epoch_end=False
    )
    made = module()
    # The Trainer moves checkpoint callbacks to the end. The first place is the harder case.
    run = lightning.pytorch.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeper, Calibration()],
    )
    run.fit(made, loader(TRAIN), loader(VALIDATION))
    for epoch in range(EPOCHS):
        saved = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"]
        assert_equal(saved, plain_loop(epochs=epoch + 1))


@pytest.mark.parametrize("key", ADAPTIVE)
def test_resuming_equals_never_having_stopped(key, tmp_path):
    with pytest.warns(AdaptationWarning, match=TOO_LATE):
        first = fit(module(key), max_epochs=1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    second = module(key)
    fit(second, ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert second.loss.passes == 2
    assert_equal(state(second), plain_loop(key, epochs=2))


def test_resuming_with_an_order_that_follows_from_the_epoch(tmp_path):
    """The sampler of the documentation. Other shuffled orders begin anew, which is not calibrant's doing."""

    def shuffled():
        return DataLoader(TRAIN, BATCH, sampler=DistributedSampler(TRAIN, num_replicas=1, rank=0))

    whole, second = module(), module()
    fit(whole, train=shuffled(), max_epochs=2)
    with pytest.warns(AdaptationWarning, match=TOO_LATE):
        fit(module(), train=shuffled(), max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    fit(second, train=shuffled(), ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert_equal(state(second), state(whole))
    assert not torch.equal(second.network.weight, plain_loop(epochs=2)["network.weight"])  # it did shuffle


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_resuming_in_the_middle_of_an_epoch_keeps_count(tmp_path):
    def keeper():
        return lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path, "{step}", save_top_k=-1, save_on_train_epoch_end=False
        )

    options = {"enable_checkpointing": True, "val_check_interval": 2}
    whole, second = module(), module()
    fit(whole, callbacks=[keeper()], **options)
    half = tmp_path / "step=6.ckpt"
    assert torch.load(half, weights_only=True)["state_dict"]["loss.passes"] == 3
    fit(second, callbacks=[keeper()], ckpt_path=half, **options)
    assert second.loss.passes == whole.loss.passes == 2 * EPOCHS
    # The weights are not compared: Lightning starts again with the first batch of the loader.


# ------------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("place", ["validation_step", "on_validation_epoch_end"])
def test_an_interrupted_validation_leaves_nothing_behind(place, error):
    def fail(self, *args):
        if place == "validation_step":
            self.loss(self.network(args[0][0]), args[0][1])
            if args[1] == 0 or self.trainer.sanity_checking:
                return
        if self.healthy or self.trainer.sanity_checking:
            return
        raise error("on purpose")

    if place == "validation_step":
        broken = module(validation_step=lambda self, batch, batch_idx: fail(self, batch, batch_idx))
    else:
        broken = module(on_validation_epoch_end=fail)
    broken.healthy = False
    callback = Calibration()
    fresh = state(broken)
    with pytest.raises(error, match="on purpose"):
        fit(broken, callback)
    assert_clean(broken)
    if place == "validation_step":
        assert not moved(state(broken))
    else:
        assert broken.loss.passes == 1  # the callback's hook runs before the module's
    broken.healthy = True
    broken.load_state_dict(fresh)
    broken.train()  # Lightning leaves it in evaluation mode
    fit(broken, callback)
    assert_equal(state(broken), plain_loop())


def test_what_the_loss_refuses_ends_the_fit_and_leaves_the_state():
    bad = TensorDataset(torch.full((9, FEATURES), torch.nan), torch.zeros(9, dtype=torch.long))
    made = module()
    with pytest.raises(ValueError, match=r"adapt\(\) refused: some logits"):
        fit(made, validation=loader(bad))
    assert not moved(state(made))
    assert_clean(made)


# --------------------------------------------------------------------------------- where the logits are


def test_keyword_arguments_are_understood():
    def validation_step(self, batch):
        self.loss(target=batch[1], logits=self.network(batch[0]))

    def half_keywords(self, batch):
        self.loss(self.network(batch[0]), target=batch[1])

    for step in (validation_step, half_keywords):
        made = module(validation_step=step)
        fit(made)
        assert_equal(state(made), plain_loop())


def twice(self, batch):
    self.loss(self.network(batch[0]) / 2, batch[1])
    self.loss(self.network(batch[0]), batch[1])
    return {"logits": self.network(batch[0])}


def never(self, batch):
    return {"logits": self.network(batch[0])}


@pytest.mark.parametrize(
    ("step", "message"),
    [(twice, "validation_step called the loss 2 times for one batch"), (never, "did not call the loss")],
)
@pytest.mark.parametrize("sanity", [0, 2])
def test_a_step_that_does_not_call_the_loss_once(step, message, sanity):
    made = module(validation_step=step)
    with pytest.raises(RuntimeError, match=message) as caught:
        fit(made, num_sanity_val_steps=sanity)
    assert "self.loss(logits, target)" in str(caught.value)
    assert "Calibration(predictions=" in str(caught.value)
    assert_clean(made)
    made = module(validation_step=step)
    fit(made, Calibration(predictions=lambda outputs, batch: (outputs["logits"], batch[1])))
    assert_equal(state(made), plain_loop())


@pytest.mark.parametrize("step", [twice, never])
def test_a_test_step_of_that_kind_is_not_measured_but_runs(step):
    made = module(test_step=step)
    with pytest.warns(
        UserWarning, match="calibrant: no metrics in this test: test_step .* the loss"
    ) as caught:
        (figures,) = trainer().test(made, loader(OTHER), verbose=False) or [{}]
    assert len([warning for warning in caught if "no metrics in this test" in str(warning.message)]) == 1
    assert figures == {}
    predictions = Calibration(predictions=lambda outputs, batch: (outputs["logits"], batch[1]))
    (figures,) = trainer(predictions).test(made, loader(OTHER), verbose=False)
    assert "test/ece" in figures


@pytest.mark.parametrize(
    ("found", "got"),
    [(None, "got NoneType"), (([1.0], [0]), "got tuple of list, list"), ([], "got list of nothing")],
)
def test_predictions_of_the_wrong_form(found, got):
    with pytest.raises(TypeError, match=f"must return two tensors, logits and target; {got}"):
        fit(module(), Calibration(predictions=lambda outputs, batch: found))


# ------------------------------------------------------------------------------------- where the loss is


def test_the_loss_of_torch_is_measured():
    made = module(None, loss=nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="adapts, and val/classwise_ece is not logged because .*: give it"):
        run = fit(made)
    with pytest.warns(UserWarning, match="Classifier has no calibrant loss, so nothing adapts: give it one"):
        fit(module(None, loss=nn.CrossEntropyLoss()), Calibration(metrics=CalibrationError("ece")))
    expected = fit(module("ce")).callback_metrics
    assert "val/classwise_ece" in expected
    names = {"val/loss", "val/nll", "val/ece", "val/adaptive_ece"}
    assert set(run.callback_metrics) == names
    for name in names:
        torch.testing.assert_close(run.callback_metrics[name], expected[name])
    assert_clean(made)
    (figures,) = trainer().test(made, loader(OTHER), verbose=False)
    assert "test/ece" in figures


def test_without_any_loss_training_goes_on():
    def step(self, batch, batch_idx=0, dataloader_idx=0):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    made = module(None, training_step=step, validation_step=step, test_step=step)
    with pytest.warns(UserWarning, match="nothing adapts.* nothing is measured: pass predictions=") as caught:
        run = fit(made)
    assert len([each for each in caught if "nothing adapts" in str(each.message)]) == 1
    assert run.callback_metrics == {}
    made = module(None, training_step=step, validation_step=step)
    with pytest.warns(UserWarning, match="nothing adapts"):
        run = fit(
            made, Calibration(predictions=lambda outputs, batch, made: (made.network(batch[0]), batch[1]))
        )
    assert set(run.callback_metrics) == {"val/nll", "val/ece", "val/adaptive_ece"}


def test_predictions_may_take_the_module():
    def validation_step(self, batch):
        return self.loss(self.network(batch[0]) / 2, batch[1])  # what the loss sees is not what counts

    made = module(validation_step=validation_step)
    fit(made, Calibration(predictions=lambda outputs, batch, made: (made.network(batch[0]), batch[1])))
    assert_equal(state(made), plain_loop())


def test_predictions_get_the_module_only_in_an_argument_without_default():
    def scaled(outputs, batch, scale=1.0):
        return outputs["logits"] * scale, batch[1]

    def validation_step(self, batch):
        return {"logits": self.network(batch[0])}

    made = module(validation_step=validation_step)
    fit(made, Calibration(predictions=scaled))
    assert_equal(state(made), plain_loop())


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_outside_of_fit_a_module_without_loss_warns(stage):
    def step(self, batch, batch_idx=0, dataloader_idx=0):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    made = module(None, training_step=step, validation_step=step, test_step=step)
    with pytest.warns(UserWarning, match="Classifier has no calibrant loss.* pass predictions=") as caught:
        getattr(trainer(), stage)(made, loader(OTHER), verbose=False)
    assert len([each for each in caught if "nothing is measured" in str(each.message)]) == 1


@pytest.mark.parametrize("key", ["cals-alm", "ce"])
def test_single_logits(key):
    def data(count, seed):
        inputs, target = labelled(count, seed).tensors
        return loader(TensorDataset(inputs, target % 2))

    made = module(None, loss=calibrant.create_loss(key, 2, binary=True), network=nn.Linear(FEATURES, 1))
    named = Calibration(predictions=lambda _, batch, made: (made.network(batch[0]), batch[1]))
    for callback in (Calibration(), named):
        run = trainer(callback)
        run.fit(made, data(32, 1), data(21, 2))
        figures = {name for name in run.callback_metrics if name.startswith("val/")}
        assert figures == {"val/loss", "val/nll", "val/ece", "val/adaptive_ece"}
        assert all(value.isfinite() for value in run.callback_metrics.values())


def test_several_losses():
    def both():
        return module(auxiliary=calibrant.create_loss("cals-hr", CLASSES))

    with pytest.raises(ValueError, match=r"several calibrant losses \(loss, auxiliary\): .*\(loss='loss'\)"):
        fit(both())
    with pytest.raises(
        ValueError, match=r"\(loss='los'\): Classifier has no .* of that name, only loss, auxiliary"
    ):
        fit(both(), Calibration(loss="los"))
    made = both()
    fit(made, Calibration(loss="loss"))
    assert made.auxiliary.passes == 0
    assert_equal(made.loss.state_dict(prefix="loss."), {k: v for k, v in plain_loop().items() if "loss" in k})


def test_a_loss_inside_another_module_is_found():
    head = nn.Module()
    head.loss = calibrant.create_loss("cals-alm", CLASSES)

    def step(self, batch):
        return self.head.loss(self.network(batch[0]), batch[1])

    for name in (None, "head.loss"):
        made = module(None, head=head, training_step=step, validation_step=step)
        fit(made, Calibration(loss=name))
    assert head.loss.passes == 2 * EPOCHS


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", [None, "loss"])
def test_a_compiled_loss(name):
    made = module(None, loss=torch.compile(calibrant.create_loss("cals-alm", CLASSES), backend="eager"))
    hooks = Note(
        "on_validation_batch_start",
        lambda run, made: (len(made.loss._forward_hooks), len(made.loss._orig_mod._forward_hooks)),
    )
    fit(made, Calibration(loss=name), callbacks=[hooks])
    assert set(hooks.found) == {(1, 0)}  # a hook inside would be compiled
    assert not made.loss._forward_hooks
    assert not made.loss._orig_mod._forward_hooks
    found = {key.replace("_orig_mod.", ""): value for key, value in state(made).items()}
    for key, value in plain_loop().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- several loaders


@pytest.mark.parametrize(
    ("gather", "index"),
    [(list, 0), (list, 1), (tuple, 1), (lambda loaders: dict(zip("ab", loaders, strict=True)), 1)],
    ids=["list, first", "list", "tuple", "dict"],
)
def test_one_loader_counts(gather, index):
    data = [OTHER, VALIDATION][index]
    made = module()
    run = fit(made, Calibration(dataloader_idx=index), gather([loader(OTHER), loader(VALIDATION)]))
    assert_equal(state(made), plain_loop(data=data))
    expected = calibrant.evaluate_on(made.network, loader(data), resamples=0)
    assert run.callback_metrics["val/ece"].item() == pytest.approx(expected.ece)


def test_test_loaders():
    made = module()
    fitted = Calibration(dataloader_idx=1)
    ece = [calibrant.evaluate_on(made.network, loader(data), resamples=0).ece for data in (OTHER, VALIDATION)]
    (only,) = trainer(fitted).test(made, loader(OTHER), verbose=False)
    assert only["test/ece"] == pytest.approx(ece[0])
    both = trainer(fitted).test(made, [loader(OTHER), loader(VALIDATION)], verbose=False)
    assert both[0]["test/ece"] == pytest.approx(ece[1])


def test_a_loader_that_is_not_there():
    with pytest.raises(ValueError, match=r"\(dataloader_idx=2\): there is no such loader, only 0 to 1"):
        fit(module(), Calibration(dataloader_idx=2), [loader(OTHER), loader(VALIDATION)])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Calibration(dataloader_idx=-1)


# -------------------------------------------------------------------------------------------- repetitions


def second_half(data, **options):
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    return loader(data, sampler=sampler, **options)


SECOND_HALF = TensorDataset(*(tensor[1::2] for tensor in VALIDATION.tensors))


@pytest.mark.parametrize("gather", [lambda found: found, lambda found: {"a": loader(OTHER), "b": [found]}])
def test_repeats_of_a_sampler_do_not_count(gather):
    assert len(VALIDATION) % 2 == 1
    assert len(second_half(VALIDATION).sampler) == len(SECOND_HALF) + 1
    loaders = gather(second_half(VALIDATION))
    callback = Calibration(dataloader_idx=1 if isinstance(loaders, dict) else 0)
    made = module()
    run = fit(made, callback, loaders, use_distributed_sampler=False)
    assert_equal(state(made), plain_loop(data=SECOND_HALF))
    expected = calibrant.evaluate_on(made.network, loader(SECOND_HALF), resamples=0).ece
    assert run.callback_metrics["val/ece"].item() == pytest.approx(expected)
    new = trainer(callback, use_distributed_sampler=False)
    (validated,) = new.validate(made, loaders, verbose=False)[-1:]
    (tested,) = trainer(callback, use_distributed_sampler=False).test(made, loaders, verbose=False)[-1:]
    assert validated["val/ece"] == pytest.approx(expected)
    assert tested["test/ece"] == pytest.approx(expected)


def test_repeats_among_flattened_rows():
    """Three rows of logits for every element, as in token classification after a reshape."""

    def validation_step(self, batch):
        logits = (
            self.network(batch[0]).repeat_interleave(3, 0)
            * torch.tensor([1.0, 2, 3]).repeat(len(batch[0]))[:, None]
        )
        self.loss(logits, batch[1].repeat_interleave(3))

    made, expected = (module(validation_step=validation_step) for _ in range(2))
    fit(made, validation=second_half(VALIDATION), use_distributed_sampler=False)
    fit(expected, validation=loader(SECOND_HALF))
    assert_equal(state(made), state(expected))


def test_repeats_among_ready_made_batches():
    """A data set whose elements are batches; the last one is a repeat."""
    inputs, target = VALIDATION.tensors
    batches = list(zip(inputs.split(3), target.split(3), strict=True))
    assert len(batches) == 7
    sampler = DistributedSampler(batches, num_replicas=2, rank=1, shuffle=False)
    made, expected = module(), module()
    fit(made, validation=DataLoader(batches, batch_size=None, sampler=sampler), use_distributed_sampler=False)
    fit(expected, validation=DataLoader(batches[1::2], batch_size=None))
    assert_equal(state(made), state(expected))


def test_repeats_among_rows_that_cannot_be_told_apart():
    def validation_step(self, batch):
        logits = self.network(batch[0])
        keep = logits.argmax(1) != 0
        self.loss(logits[keep], batch[1][keep])

    with pytest.raises(
        ValueError,
        match="1 of 3 elements in this batch are repeats of the sampler, but it is not known which",
    ):
        fit(
            module(validation_step=validation_step),
            validation=second_half(VALIDATION),
            use_distributed_sampler=False,
        )
    fit(module(validation_step=validation_step))


# ------------------------------------------------------------------------------------------------ figures


def test_a_loss_without_effect_is_told_at_the_end_of_the_fit():
    made = module(loss=calibrant.create_loss("cals-alm", CLASSES, margin=1e6))
    with pytest.warns(
        AdaptationWarning, match="AugmentedLagrangian: after 12 passes the penalty is still"
    ) as caught:
        fit(made, max_epochs=3, val_check_interval=1)
    assert sum(warning.category is AdaptationWarning for warning in caught) == 1


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr"])
def test_a_short_fit_tells_of_a_loss_without_effect(key):
    made = module(loss=calibrant.create_loss(key, CLASSES, margin=1e6))
    idle = "its penalty had no effect in 3 passes: .* Try a .* or train for"
    with pytest.warns(AdaptationWarning, match=idle) as caught:
        fit(made, max_epochs=3)
    assert [warning.category for warning in caught].count(AdaptationWarning) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AdaptationWarning)
        fit(made, fast_dev_run=True)
        fit(module(loss=calibrant.create_loss(key, CLASSES, margin=0.5)), max_epochs=3)
        fit(module("ada-scale"), max_epochs=3)
    assert not [warning for warning in caught if warning.category is AdaptationWarning]


def test_what_is_logged():
    made = module()
    run = fit(made)
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    expected = calibrant.evaluate_on(made.network, loader(VALIDATION), resamples=0)
    assert logged["val/nll"] == pytest.approx(expected.nll)
    assert logged["val/ece"] == pytest.approx(expected.ece)
    assert logged["val/classwise_ece"] == pytest.approx(expected.classwise_ece)
    assert logged["val/adaptive_ece"] == pytest.approx(expected.adaptive_ece, abs=0.02)
    assert logged["loss/passes"] == EPOCHS
    assert logged["loss/multiplier_mean"] == pytest.approx(made.loss.multiplier.mean().item())
    assert logged["loss/multiplier_min"] == pytest.approx(made.loss.multiplier.min().item())
    assert logged["loss/multiplier_max"] == pytest.approx(made.loss.multiplier.max().item())
    assert logged["loss/multiplier_min"] < logged["loss/multiplier_mean"] < logged["loss/multiplier_max"]


def test_adaptive_focal_loss_logs_its_exponents():
    run = fit(module("adafocal"))
    assert {"loss/gamma_mean", "loss/gamma_min", "loss/gamma_max"} < set(run.callback_metrics)
    assert not any("edges" in name for name in run.callback_metrics)


def test_a_collection_of_ones_own():
    metrics = MetricCollection(
        {"accuracy": MulticlassAccuracy(CLASSES, average="micro"), "mce": CalibrationError("mce")},
        prefix="my_",
    )
    metrics.update(2 * torch.eye(CLASSES), torch.arange(CLASSES))
    made = module()
    run = fit(made, Calibration(metrics=metrics))
    expected = calibrant.evaluate_on(made.network, loader(VALIDATION), resamples=0)
    assert run.callback_metrics["val/my_accuracy"].item() == pytest.approx(expected.accuracy)
    assert run.callback_metrics["val/my_mce"].item() == pytest.approx(expected.mce)
    assert "val/ece" not in run.callback_metrics
    assert metrics["mce"].update_count == 1  # the user's own metric is unchanged
    (tested,) = trainer(Calibration(metrics=metrics)).test(made, loader(VALIDATION), verbose=False)
    assert tested["test/my_mce"] == pytest.approx(expected.mce)


def test_mistakes_in_the_making_are_named():
    with pytest.raises(TypeError, match=r"the name of an attribute.*got AugmentedLagrangian.*finds it"):
        Calibration(calibrant.create_loss("cals-alm", CLASSES))
    with pytest.raises(ValueError, match="two Calibration callbacks for the same loss"):
        fit(module(), callbacks=[Calibration()])
    two = module(other=calibrant.create_loss("cals-hr", CLASSES))
    scalar = Calibration(loss="other", predictions=lambda outputs, batch: (batch[0].sum(), batch[1]))
    with pytest.raises(ValueError, match=r"logits of shape \(B, K, \*S\) first, got shape \(\)"):
        fit(two, Calibration("loss"), callbacks=[scalar])


def test_one_metric_none_and_no_metric():
    run = fit(module(), Calibration(metrics=CalibrationError("mce")))
    assert "val/CalibrationError" in run.callback_metrics
    run = fit(module(), Calibration(metrics=MetricCollection({})))
    assert {name.partition("/")[0] for name in run.callback_metrics} == {"val", "loss"}
    assert {name for name in run.callback_metrics if name.startswith("val/")} == {"val/loss"}
    with pytest.raises(TypeError, match="must be a torchmetrics Metric or MetricCollection, got list"):
        Calibration(metrics=[CalibrationError()])


def test_metrics_begin_anew_with_every_run():
    callback = Calibration()
    made = module()
    fit(made, callback)
    first, second = (
        trainer(callback).validate(made, loader(data), verbose=False)[0]["val/ece"]
        for data in (VALIDATION, OTHER)
    )
    expected = [calibrant.evaluate_on(made.network, loader(d), resamples=0).ece for d in (VALIDATION, OTHER)]
    assert [first, second] == pytest.approx(expected)


def test_ignored_labels_do_not_count_in_the_metrics():
    inputs, target = VALIDATION.tensors
    ignored = torch.where(torch.arange(len(target)) % 3 == 0, 255, target)
    kept = TensorDataset(inputs[ignored != 255], target[ignored != 255])

    def losses():
        return calibrant.create_loss("cals-alm", CLASSES, ignore_index=255)

    made, expected = module(None, loss=losses()), module(None, loss=losses())
    found = fit(made, validation=loader(TensorDataset(inputs, ignored))).callback_metrics
    for name, value in fit(expected, validation=loader(kept)).callback_metrics.items():
        if name != "val/loss":
            torch.testing.assert_close(found[name], value)


# ------------------------------------------------------------------------------------ care and warnings


def test_a_fit_without_validation_warns():
    for key, expected in (("cals-alm", 1), ("ce", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer().fit(module(key), loader(TRAIN))
        messages = [
            str(warning.message) for warning in caught if "this fit has no validation" in str(warning.message)
        ]
        assert len(messages) == expected
    with pytest.warns(
        UserWarning, match="AugmentedLagrangian adapts to validation data, but this fit has no"
    ):
        fit(module(), limit_val_batches=0)


@pytest.mark.parametrize("options", [{"max_steps": 2}, {"check_val_every_n_epoch": 9}])
def test_a_fit_that_ends_before_it_validates_warns(options):
    for key, expected in (("cals-alm", 1), ("ce", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module(key), **options)
        messages = [str(each.message) for each in caught if "has not adapted" in str(each.message)]
        assert len(messages) == expected
    with pytest.warns(UserWarning, match="AugmentedLagrangian has not adapted, because no .* val_check_int"):
        fit(module(), **options)


def test_a_fit_that_adapts_only_after_its_last_step_warns():
    made = module()
    with pytest.warns(
        AdaptationWarning, match=rf"AugmentedLagrangian: .*{TOO_LATE}.*val_check_int"
    ) as caught:
        fit(made, max_epochs=1)
    assert [each.category for each in caught].count(AdaptationWarning) == 1
    fit(made, max_epochs=1)  # with what it learned before
    fit(module(), max_epochs=1, val_check_interval=3)  # of 4 batches
    fit(module("ce"), max_epochs=1)
    fit(module(), fast_dev_run=True)


def test_a_model_chosen_by_a_loss_that_moves_is_told():
    def stopping(name):
        return lightning.pytorch.callbacks.EarlyStopping(name, strict=False, patience=99)

    def told(made, name, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(made, Calibration(**options), callbacks=[stopping(name)], max_epochs=1)
        return [str(each.message) for each in caught if "cannot be compared" in str(each.message)]

    (message,) = told(module(), "val/loss")
    assert message.startswith(
        "calibrant: EarlyStopping monitors 'val/loss'. If that is the loss of Classifier"
    )
    assert message.endswith("between evaluations. Monitor 'val/nll', which is logged here")
    (message,) = told(module(), "val/loss", metrics=MetricCollection({}))
    assert message.endswith("between evaluations")
    assert not told(module(), "val/nll")
    assert not told(module("ce"), "val/loss")


def test_the_time_out_is_passed_on(monkeypatch):
    found = []
    adapt = calibrant.losses.AugmentedLagrangian.adapt

    def noted(self, group=None, *, timeout=None):
        found.append((group, timeout))
        return adapt(self, group)

    monkeypatch.setattr(calibrant.losses.AugmentedLagrangian, "adapt", noted)
    fit(module(), Calibration(timeout=12.5))
    fit(module())
    assert found == 2 * [(None, 12.5)] + 2 * [(None, None)]


@pytest.mark.skipif(
    not hasattr(lightning.pytorch.callbacks, "EMAWeightAveraging"),
    reason="this Lightning does not average weights",
)
def test_averaged_weights():
    """The callback validates averaged weights and buffers, then restores the module's own."""

    def average():
        return lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)

    passes = Note("on_validation_end", lambda run, made: made.loss.passes.item())
    own = Note("on_validation_start", lambda run, made: made.loss.multiplier.clone())
    made, averages, used = module(), [], []
    observe, forward = made.loss.observe, made.loss.forward

    def observing(logits, target):
        used.append((len(own.found), made.loss.multiplier.clone()))
        observe(logits, target)

    def calling(logits, target):
        averages.append(made.loss.multiplier.clone())
        return forward(logits, target)

    made.loss.observe, made.loss.forward = observing, calling
    run = trainer(average(), callbacks=[Calibration(), passes, own], num_sanity_val_steps=2)
    run.fit(made, loader(TRAIN), loader(VALIDATION))
    assert passes.found == list(range(EPOCHS + 1))  # the sanity check first
    assert len(used) == EPOCHS * len(loader(VALIDATION))
    assert all(torch.equal(multiplier, own.found[number - 1]) for number, multiplier in used)
    assert any(
        not any(torch.equal(each, mine) for mine in own.found) for each in averages
    )  # there were others
    with pytest.raises(RuntimeError, match=r"not its own at the end of validation.*put Calibration after"):
        fit(module(), callbacks=[average()])


class FSDPStrategy:
    """Replaces Lightning's strategy, which needs a GPU."""

    root_device = torch.device("cpu")

    def __init__(self, **options):
        self.kwargs = options


class Derived(FSDPStrategy):
    pass


@pytest.mark.parametrize("strategy", [FSDPStrategy(), Derived(ignored_modules=None)])
def test_sharding_leaves_the_loss_alone(strategy):
    callback, run = Calibration(), SimpleNamespace(strategy=strategy)
    for stage in ("fit", "validate"):
        made = module()
        callback.setup(run, made, stage)
        assert strategy.kwargs["ignored_modules"] == [made.loss]


def test_sharding_as_the_user_wants_it():
    other = nn.Linear(2, 2)
    for options in ({"ignored_modules": [other]}, {"ignored_states": [other]}):
        strategy = FSDPStrategy(**options)
        Calibration().setup(SimpleNamespace(strategy=strategy), module(), "fit")
        assert strategy.kwargs == options


def test_sharding_a_compiled_loss_and_a_loss_not_made_yet():
    strategy = FSDPStrategy()
    made = module(None, loss=torch.compile(calibrant.create_loss("cals-alm", CLASSES), backend="eager"))
    Calibration().setup(SimpleNamespace(strategy=strategy), made, "fit")
    assert strategy.kwargs["ignored_modules"] == [made.loss._orig_mod]
    strategy = FSDPStrategy()
    Calibration().setup(SimpleNamespace(strategy=strategy), module(None), "fit")
    assert strategy.kwargs == {}


def test_sharding_leaves_all_losses_alone():
    strategy = FSDPStrategy()
    made = module(auxiliary=calibrant.create_loss("cals-hr", CLASSES))
    Calibration(loss="loss").setup(SimpleNamespace(strategy=strategy), made, "fit")
    assert strategy.kwargs["ignored_modules"] == [made.loss, made.auxiliary]


def test_lightnings_strategy_keeps_what_is_asked_for():
    """The replacement has the attributes of the real strategy."""
    strategy = lightning.pytorch.strategies.FSDPStrategy(ignored_modules=[])
    assert strategy.kwargs["ignored_modules"] == []
    assert type(strategy).__name__ == FSDPStrategy.__name__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Lightning's FSDP needs a GPU")
@pytest.mark.filterwarnings("ignore")
def test_sharding_in_mixed_precision_on_a_gpu(tmp_path):
    made = module()
    strategy = lightning.pytorch.strategies.FSDPStrategy(state_dict_type="full")
    run = fit(made, accelerator="gpu", devices=1, strategy=strategy, precision="bf16-mixed")
    assert made.loss.passes == EPOCHS
    assert made.loss.multiplier.dtype == torch.float64
    assert not torch.equal(made.loss.multiplier.cpu(), calibrant.create_loss("cals-alm", CLASSES).multiplier)
    run.save_checkpoint(tmp_path / "sharded.ckpt")
    saved = torch.load(tmp_path / "sharded.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(saved["loss.multiplier"].cpu(), made.loss.multiplier.cpu())


# --------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize(
    "installed", [["lightning", "pytorch_lightning"], ["lightning"], ["pytorch_lightning"]]
)
def test_every_package_that_is_there_counts(installed, monkeypatch):
    pretend(monkeypatch, installed)
    assert [package.__name__.partition(".")[0] for package in integration._packages()] == installed


def test_no_package(monkeypatch):
    pretend(monkeypatch, [])
    with pytest.raises(ImportError, match=r'pip install "calibrant\[lightning\]"'):
        integration._packages()


def test_a_package_that_is_there_but_broken(monkeypatch):
    pretend(monkeypatch, ["lightning", "pytorch_lightning"], lacking="yaml")
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        integration._packages()


def pretend(monkeypatch, installed, lacking=None):
    def import_module(name):
        root = name.partition(".")[0]
        missing = lacking or root
        if root not in installed or lacking:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return SimpleNamespace(__name__=name)

    monkeypatch.setattr(integration.importlib, "import_module", import_module)


def test_the_callback_is_one_of_both_packages():
    assert issubclass(Calibration, lightning.pytorch.Callback)
    assert issubclass(Calibration, pytorch_lightning.Callback)
