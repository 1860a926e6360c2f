"""A Trainer with `Calibration` gives the results of a plain loop, and nothing else changes the loss."""

import copy
import functools
import json
import math
import warnings

import pytest
import torch
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

import calibrant
from calibrant import LOSSES, create_loss
from calibrant.integrations.transformers import Calibration
from calibrant.losses import AdaptationWarning, AdaptiveLoss

ADAPTIVE = [key for key, loss in LOSSES.items() if issubclass(loss, AdaptiveLoss)]
CLASSES = 3

BERT = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
}


def bert(head=BertForSequenceClassification, **options):
    torch.manual_seed(0)
    return head(BertConfig(**{**BERT, **options}))


def sentences(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 20, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row[0] % CLASSES} for row in words]


def tagged(count, seed=0):
    """Sentences with 8, 7, ... 1 labelled words."""
    rows = []
    for number, sentence in enumerate(sentences(count, seed)):
        words = torch.cat([sentence["input_ids"], sentence["input_ids"][:2]])
        labels = words % CLASSES
        labels[8 - number % 8 :] = -100
        rows.append({"input_ids": words, "labels": labels})
    return rows


class InOrder(Trainer):
    """A trainer that does not shuffle, to compare it with a plain loop."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(self.train_dataset, self.args.train_batch_size))


def trainer_for(
    calibration,
    folder,
    *,
    model=None,
    train=None,
    evaluate=None,
    callbacks=(),
    measure=False,
    trainer=InOrder,
    **options,
):
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_strategy": "no",
        "learning_rate": 0.05,
        **options,
    }
    return trainer(
        model=bert() if model is None else model,
        args=TrainingArguments(
            str(folder), report_to="none", use_cpu=True, disable_tqdm=True, seed=1, **arguments
        ),
        train_dataset=sentences(16) if train is None else train,
        eval_dataset=sentences(7, seed=1) if evaluate is None else evaluate,
        compute_loss_func=calibration.compute_loss,
        compute_metrics=calibration.compute_metrics if measure else None,
        callbacks=[calibration, *callbacks],
    )


def alm(**options):
    return create_loss("cals-alm", CLASSES, margin=0.5, **options)


def snapshot(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_identical(state, expected):
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def assert_close(state, expected, tolerance=1e-5):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)


@pytest.fixture
def observed(monkeypatch):
    """The number of valid elements in each adaptation pass of an augmented Lagrangian."""
    counts = []
    adapt = AdaptiveLoss.adapt

    def counting(self, *arguments, **options):
        statistics = adapt(self, *arguments, **options)
        counts.append(int(statistics.samples))
        return statistics

    monkeypatch.setattr(AdaptiveLoss, "adapt", counting)
    return counts


# ---- The loss of a batch ----------------------------------------------------------------------------


def test_logits_are_found_in_what_models_return():
    calibration = Calibration(create_loss("ce", CLASSES))
    logits, labels = torch.randn(4, CLASSES), torch.tensor([0, 1, 2, 0])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    for outputs in (SequenceClassifierOutput(logits=logits), {"logits": logits}, (logits, None), logits):
        torch.testing.assert_close(calibration.compute_loss(outputs, labels), expected)


def test_tokens_and_pixels_are_arranged_for_the_loss():
    loss = create_loss("focal", CLASSES)
    calibration = Calibration(loss)
    tokens, tags = torch.randn(2, 5, CLASSES), torch.randint(-1, CLASSES, (2, 5))
    tags[tags < 0] = -100
    expected = loss(tokens.movedim(-1, 1), tags)
    torch.testing.assert_close(calibration.compute_loss((tokens,), tags), expected)
    pixels, classes = torch.randn(2, CLASSES, 4, 5), torch.randint(CLASSES, (2, 16, 20))
    enlarged = interpolate(pixels, (16, 20), mode="bilinear", align_corners=False)
    torch.testing.assert_close(calibration.compute_loss((pixels,), classes), loss(enlarged, classes))


def test_probabilities_are_targets_where_the_loss_takes_them():
    calibration = Calibration(create_loss("ce", CLASSES))
    logits, target = torch.randn(4, CLASSES), torch.rand(4, CLASSES).softmax(1)
    expected = torch.nn.functional.cross_entropy(logits, target)
    torch.testing.assert_close(calibration.compute_loss((logits,), target), expected)
    halves = [calibration.compute_loss((logits[i : i + 2],), target[i : i + 2], 12) for i in (0, 2)]
    torch.testing.assert_close(sum(halves), expected)  # Trainer counts all 12 numbers


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_the_label_that_trainer_pads_with_is_always_ignored(ignore_index):
    calibration = Calibration(create_loss("ce", CLASSES, ignore_index=ignore_index))
    logits = torch.randn(1, 4, CLASSES)
    value = calibration.compute_loss((logits,), torch.tensor([[1, 2, ignore_index, -100]]))
    expected = torch.nn.functional.cross_entropy(logits[0, :2], torch.tensor([1, 2]))
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("key", ["ce", "cals-alm", "adafocal"])
def test_shares_of_a_step_add_up_to_one_large_batch(key):
    loss = create_loss(key, CLASSES)
    calibration = Calibration(loss)
    logits, labels = 9 * torch.randn(4, 6, CLASSES), torch.randint(CLASSES, (4, 6))
    for row, count in enumerate([6, 1, 0, 3]):
        labels[row, count:] = -100
    parts = [
        calibration.compute_loss((logits[i : i + 1],), labels[i : i + 1], torch.tensor(10)) for i in range(4)
    ]
    torch.testing.assert_close(sum(parts), loss(logits.flatten(0, 1), labels.flatten()))
    nothing = calibration.compute_loss((logits[2:3],), labels[2:3], torch.tensor(0))
    assert nothing == 0


DECISIONS = {
    "single logits": ((6,), (6,)),
    "a single label": ((6, 1), (6,)),
    "several labels": ((6, 3), (6, 3)),
    "tokens": ((2, 5, 1), (2, 5)),
    "tokens with several labels": ((2, 5, 3), (2, 5, 3)),
    "pixels": ((2, 1, 4, 4), (2, 8, 8)),
    "pixels with several labels": ((2, 3, 4, 4), (2, 3, 8, 8)),
}
"""Shapes of logits and labels with ``binary=True``."""


@pytest.mark.parametrize(("shape", "of_labels"), DECISIONS.values(), ids=DECISIONS)
def test_binary_losses_take_a_decision_for_each_logit(shape, of_labels):
    """Also with labels that are floats, as transformers wants them for several labels."""
    logits, labels = 3 * torch.randn(shape), torch.randint(2, of_labels)
    decisions = logits
    if logits.ndim == 4:
        decisions = interpolate(logits, of_labels[-2:], mode="bilinear", align_corners=False)
    elif logits.ndim == 3:
        decisions = logits.flatten(0, 1)
    answers = labels.reshape(decisions.shape)
    expected = figures(decisions, answers, binary=True)
    for dtype in (torch.long, torch.float32):
        for key in ("ce", "focal"):  # focal takes no probabilities
            loss = create_loss(key, 2, binary=True)
            calibration = Calibration(loss, metrics=FIGURES)
            value = calibration.compute_loss((logits,), labels.to(dtype))
            torch.testing.assert_close(value, loss(decisions, answers))
        # Metrics do not depend on the loss.
        found = calibration.compute_metrics(EvalPrediction(logits.numpy(), labels.to(dtype).numpy()))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_labels_that_are_not_known_are_ignored_in_floats_too(ignore_index):
    calibration = Calibration(create_loss("ce", 2, binary=True, ignore_index=ignore_index), metrics=FIGURES)
    logits, labels = torch.randn(4, 3), torch.randint(2, (4, 3)).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, :2], labels[:, :2])
    labels[:, 2] = torch.tensor([-100, -100, ignore_index, ignore_index])
    torch.testing.assert_close(calibration.compute_loss((logits,), labels), expected)
    logits, labels = logits[:, [0, 2]], labels[:, [0, 2]]
    logits[0, 1], labels[0, 1] = 0.5, 1
    found = calibration.compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))
    known = labels.long().masked_fill(labels == ignore_index, -100)
    assert found == pytest.approx(figures(logits, known, binary=True))


def test_probabilities_of_labels_are_targets_where_the_loss_takes_them():
    logits, target = torch.randn(4, 3), torch.rand(4, 3)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
    value = Calibration(create_loss("ce", 2, binary=True)).compute_loss((logits,), target)
    torch.testing.assert_close(value, expected)
    with pytest.raises(TypeError, match="integers 0 and 1"):
        Calibration(create_loss("focal", 2, binary=True)).compute_loss((logits,), target)


@pytest.mark.parametrize(
    ("logits", "labels"), [((4, 3), (4,)), ((4, 3), (4, 2)), ((2, 5, 3), (2, 5)), ((2, 3, 4, 4), (2, 8, 8))]
)
def test_labels_that_do_not_fit_single_logits_are_refused_by_their_shape(logits, labels):
    with pytest.raises(ValueError, match=r"do not fit together: expected .*binary=True") as told:
        Calibration(create_loss("ce", 2, binary=True)).compute_loss(
            (torch.zeros(logits),), torch.zeros(labels)
        )
    assert f"of shape {logits} and torch.float32 labels of shape {labels}" in str(told.value)


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        ((torch.zeros(2, 3),), None, "no labels"),
        ({"last_hidden_state": torch.zeros(2, 3)}, torch.zeros(2).long(), "only: last_hidden_state"),
        ((), torch.zeros(2).long(), "must be a tensor, got tuple"),
        ((torch.zeros(2, 3),), torch.zeros(3).long(), r"\(2, 3\) and torch.int64 labels of shape \(3,\)"),
        ((torch.zeros(2, 3),), torch.zeros(2), r"\(2, 3\) and torch.float32 labels of shape \(2,\)"),
        ((torch.zeros(2, 4, 3),), torch.zeros(2, 3).long(), r"\(2, 4, 3\) and .* \(2, 3\)"),
        ((torch.zeros(2, 3, 4, 4),), torch.zeros(2, 4).long(), r"\(2, 3, 4, 4\) and .* \(2, 4\)"),
        ((torch.zeros(2, 3, 4, 4),), torch.zeros(3, 4, 4).long(), r"\(3, 4, 4\)"),
        ((torch.zeros(3),), torch.zeros(3).long(), r"\(3,\) and"),
        ((torch.zeros(2, 4),), torch.zeros(2).long(), "num_classes=3"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_shape(outputs, labels, message):
    with pytest.raises(ValueError, match=message):
        Calibration(create_loss("ce", CLASSES)).compute_loss(outputs, labels)


def test_a_compiled_loss_is_taken_for_what_it_is():
    loss = alm()
    calibration = Calibration(torch.compile(loss, backend="eager"))
    assert calibration.loss is loss
    logits, labels = torch.randn(4, CLASSES), torch.tensor([0, 1, 2, 0])
    torch.testing.assert_close(calibration.compute_loss((logits,), labels), loss(logits, labels))
    compiled = torch.compile(torch.nn.CrossEntropyLoss(), backend="eager")
    with pytest.raises(TypeError, match="got CrossEntropyLoss"):
        Calibration(compiled)


def test_only_losses_that_are_means_are_taken():
    with pytest.raises(ValueError, match="reduction='mean', got 'sum'"):
        Calibration(create_loss("ce", CLASSES, reduction="sum"))
    with pytest.raises(TypeError, match="CrossEntropyLoss"):
        Calibration(torch.nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"metrics must be one of .*'ece'.*, got 'kde_ece'"):
        Calibration(create_loss("ce", CLASSES), metrics=["kde_ece"])


# ---- The same as the plain loop ---------------------------------------------------------------------


def train_plainly(model, loss, train, validation, *, epochs, batch, rate):
    """The expected result: optimizer steps on whole batches, then one adaptation pass."""

    def tensors(rows):
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def arranged(inputs):
        logits, labels = model(input_ids=inputs["input_ids"]).logits, inputs["labels"]
        return (logits.movedim(-1, 1) if logits.ndim == 3 else logits), labels

    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(epochs):
        model.train()
        for start in range(0, len(train), batch):
            optimizer.zero_grad()
            loss(*arranged(tensors(train[start : start + batch]))).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss.observe(*arranged(tensors(validation)))
        loss.adapt()


PLAIN = {
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "learning_rate": 0.1,
    "num_train_epochs": 2,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("key", ["cals-alm", "adafocal"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_tokens_of_unequal_number_train_as_in_a_plain_loop(key, accumulation, tmp_path, observed):
    """Batches of 4 sentences, or gradients accumulated over sentences with 8, 7, 6 and 5 labels."""
    train, validation = tagged(16), tagged(5, seed=1)
    options = {"margin": 0.5} if key == "cals-alm" else {}
    expected_loss, expected = (
        create_loss(key, CLASSES, **options),
        bert(BertForTokenClassification, **STILL),
    )
    train_plainly(expected, expected_loss, train, validation, epochs=2, batch=4, rate=0.1)
    loss, model = create_loss(key, CLASSES, **options), bert(BertForTokenClassification, **STILL)
    trainer_for(
        Calibration(loss),
        tmp_path,
        model=model,
        train=train,
        evaluate=validation,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        **PLAIN,
    ).train()
    assert observed == [8 + 7 + 6 + 5 + 4] * 4  # half of them by the plain loop
    moved = [name for name, value in snapshot(create_loss(key, CLASSES, **options)).items()]
    fresh = create_loss(key, CLASSES, **options).state_dict()
    assert any(not torch.equal(fresh[name], loss.state_dict()[name]) for name in moved if name != "passes")
    assert_close(snapshot(model), snapshot(expected))
    assert_close(snapshot(loss), snapshot(expected_loss))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("key", ["cals-alm", "adafocal"])
def test_single_logits_train_as_in_a_plain_loop(key, several, tmp_path, observed):
    """One logit with integer labels, or three labels as floats."""
    train, validation = sentences(16), sentences(7, seed=1)
    for row in (*train, *validation):
        row["labels"] = row["input_ids"][:3] % 2 if several else row["input_ids"][0] % 2
    options = {"margin": 0.5} if key == "cals-alm" else {}
    head = {"num_labels": 3, "problem_type": "multi_label_classification"} if several else {"num_labels": 1}

    def loss_and_model():
        return create_loss(key, 2, binary=True, **options), bert(**STILL, **head)

    expected_loss, expected = loss_and_model()
    train_plainly(expected, expected_loss, train, validation, epochs=2, batch=4, rate=0.1)
    if several:
        train, validation = (
            [{**row, "labels": row["labels"].float()} for row in rows] for rows in (train, validation)
        )
    observed.clear()
    loss, model = loss_and_model()
    trainer = trainer_for(
        Calibration(loss, metrics=FIGURES),
        tmp_path,
        model=model,
        train=train,
        evaluate=validation,
        measure=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **PLAIN,
    )
    trainer.train()
    assert observed == [7 * (3 if several else 1)] * 2
    assert_close(snapshot(model), snapshot(expected))
    assert_close(snapshot(loss), snapshot(expected_loss))
    predicted = trainer.predict(validation)
    wanted = figures(
        *(torch.as_tensor(part) for part in (predicted.predictions, predicted.label_ids.astype(int))),
        binary=True,
    )
    assert {name: predicted.metrics[f"test_{name}"] for name in FIGURES} == pytest.approx(wanted)


def pictures(count, shape=()):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(3, 16, 16, generator=generator),
            "labels": torch.randint(CLASSES, shape, generator=generator),
        }
        for _ in range(count)
    ]


def vit():
    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=8,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=CLASSES,
        )
    )


def segformer():
    return SegformerForSemanticSegmentation(
        SegformerConfig(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[4, 2],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=8,
            num_labels=CLASSES,
            semantic_loss_ignore_index=255,
        )
    )


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast")  # of the oldest accelerate
@pytest.mark.parametrize(
    ("model", "data", "elements"),
    [
        (bert, lambda: sentences(6), 6),
        (lambda: bert(BertForTokenClassification), lambda: tagged(6), 8 + 7 + 6 + 5 + 4 + 3),
        (vit, lambda: pictures(6), 6),
        (segformer, lambda: pictures(6, (16, 16)), 6 * 16 * 16),
    ],
    ids=["sequences", "tokens", "images", "pixels"],
)
def test_every_head_trains_adapts_and_is_measured(model, data, elements, tmp_path, observed):
    calibration = Calibration(alm())
    trainer = trainer_for(
        calibration,
        tmp_path,
        model=model(),
        train=data(),
        evaluate=data(),
        measure=True,
        bf16=True,
    )
    trainer.train()
    assert observed == 2 * [elements]
    metrics = trainer.evaluate()
    assert {"eval_accuracy", "eval_nll", "eval_ece", "eval_classwise_ece"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


def test_pixels_may_be_ignored_by_another_label(tmp_path, observed):
    data = pictures(4, (16, 16))
    for row in data:
        row["labels"][:8] = 255
    calibration = Calibration(alm(ignore_index=255), metrics=["mean_iou"])
    trainer = trainer_for(
        calibration,
        tmp_path,
        model=segformer(),
        train=data,
        evaluate=data,
        measure=True,
    )
    trainer.train()
    assert observed == 2 * [4 * 8 * 16]
    assert 0 <= trainer.evaluate()["eval_mean_iou"] <= 1


# ---- Which evaluations count ------------------------------------------------------------------------


def test_the_loss_adapts_once_for_every_evaluation_of_training(tmp_path, observed):
    calibration = Calibration(alm())
    trainer_for(calibration, tmp_path, eval_strategy="steps", eval_steps=2).train()
    assert observed == [7] * 4  # after steps 2, 4, 6 and 8
    assert calibration.loss.passes == 4


def test_evaluations_before_and_after_training_leave_the_loss_alone(tmp_path, observed):
    calibration = Calibration(alm())
    trainer = trainer_for(calibration, tmp_path, eval_on_start=True)
    trainer.evaluate()
    trainer.predict(sentences(5))
    assert_identical(snapshot(calibration.loss), snapshot(alm()))
    trainer.train()
    assert observed == 2 * [7]
    learned = snapshot(calibration.loss)
    assert not torch.equal(learned["previous_violation"], alm().previous_violation)
    trainer.evaluate()
    trainer.evaluate({"a": sentences(4), "b": sentences(4)})
    trainer.predict(sentences(5))
    assert_identical(snapshot(calibration.loss), learned)
    with pytest.raises(RuntimeError, match="nothing to learn from"):
        calibration.loss.adapt()  # and no sums were kept


class Interrupting(TrainerCallback):
    """Interrupts training at an event of the second epoch."""

    def __init__(self, event):
        setattr(self, event, self.interrupt)

    def interrupt(self, args, state, control, **rest):
        if state.epoch and state.epoch > 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "event", ["on_step_begin", "on_step_end", "on_prediction_step", "on_evaluate", "on_save"]
)
def test_an_evaluation_after_an_interruption_leaves_the_loss_alone(event, tmp_path, observed):
    calibration, interrupting = Calibration(alm()), Interrupting(event)
    trainer = trainer_for(calibration, tmp_path, callbacks=[interrupting], save_strategy="epoch")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupting)
    passes, learned = len(observed), snapshot(calibration.loss)
    assert passes > 0
    trainer.evaluate(sentences(20, seed=9))
    trainer.predict(sentences(20, seed=9))
    assert len(observed) == passes
    assert_identical(snapshot(calibration.loss), learned)
    trainer.train()
    assert observed[passes:] == [7, 7]  # the sums from before the interruption are dropped


def test_an_evaluation_that_fails_at_its_first_batch_is_not_continued(tmp_path, observed, monkeypatch):
    calibration, model = Calibration(alm()), bert()
    trainer = trainer_for(calibration, tmp_path, model=model)
    forward, trouble = type(model).forward, [True]

    @functools.wraps(forward)  # Trainer inspects its signature
    def failing(self, *arguments, **options):
        if trouble and not torch.is_grad_enabled():
            raise MemoryError
        return forward(self, *arguments, **options)

    monkeypatch.setattr(type(model), "forward", failing)
    with pytest.raises(MemoryError):
        trainer.train()
    trouble.clear()
    assert trainer.control.should_evaluate  # the trainer has not cleared its flag
    trainer.evaluate(sentences(20, seed=9))
    assert observed == []


class Meddling(TrainerCallback):
    """A common way to evaluate on other data after an epoch; it copies the control object."""

    trainer = None

    def on_epoch_end(self, args, state, control, **rest):
        own = copy.deepcopy(control)
        self.trainer.evaluate(sentences(20, seed=9), metric_key_prefix=self.prefix)
        return own


@pytest.mark.parametrize("prefix", ["eval", "train"])
@pytest.mark.parametrize("first", [False, True])
def test_evaluations_of_other_callbacks_do_not_count_nor_disturb(prefix, first, tmp_path, observed):
    calibration, meddling = Calibration(alm()), Meddling()
    meddling.prefix = prefix
    trainer = trainer_for(calibration, tmp_path, callbacks=[] if first else [meddling])
    if first:
        trainer.remove_callback(calibration)
        trainer.add_callback(meddling)
        trainer.add_callback(calibration)
    meddling.trainer = trainer
    trainer.train()
    assert observed == [7, 7]


class EvaluatingTwice(InOrder):
    """Overrides `evaluate` to evaluate the test set as well, under the same prefix."""

    def evaluate(self, *arguments, **options):
        metrics = super().evaluate(*arguments, **options)
        super().evaluate(sentences(20, seed=9))
        return metrics


def test_only_the_first_evaluation_after_a_step_counts(tmp_path, observed):
    trainer_for(Calibration(alm()), tmp_path, trainer=EvaluatingTwice).train()
    assert observed == [7, 7]


def test_one_of_several_evaluation_sets_is_learned_from(tmp_path, observed):
    sets = {"test": sentences(20, seed=9), "validation": sentences(7, seed=1), "other": sentences(9, seed=8)}
    calibration = Calibration(alm(), learn_from="validation")
    # Without dropout, because loaders and dropout draw from the same generator.
    trainer = trainer_for(calibration, tmp_path / "a", model=bert(**STILL), evaluate=sets, measure=True)
    trainer.train()
    assert observed == [7, 7]
    alone = Calibration(alm())
    trainer_for(alone, tmp_path / "b", model=bert(**STILL)).train()
    assert_identical(snapshot(calibration.loss), snapshot(alone.loss))
    assert "eval_test_ece" in trainer.evaluate()


def test_several_evaluation_sets_need_a_word_on_which_to_learn_from(tmp_path, observed):
    sets = {"test": sentences(20, seed=9), "validation": sentences(7, seed=1)}
    with pytest.raises(ValueError, match=r"'test'.*learn_from="):
        trainer_for(Calibration(alm()), tmp_path, evaluate=sets).train()
    trainer_for(Calibration(create_loss("ce", CLASSES)), tmp_path, evaluate=sets).train()
    for evaluate, names in ((sets, "eval_test, eval_validation"), (sentences(7), "eval")):
        with pytest.raises(ValueError, match=rf"learn_from='dev' names none.*has evaluated {names}\."):
            trainer_for(Calibration(alm(), learn_from="dev"), tmp_path, evaluate=evaluate).train()
    assert observed == []


# ---- Checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "restore"),
    [
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, 8, False),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, 8, True),
        ({"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 6}, 6, False),
        ({"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2}, 2, True),
    ],
    ids=["epochs", "epochs, with callbacks", "middle", "before any"],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(schedule, checkpoint, restore, tmp_path):
    """Four steps per epoch, with dropout, so that the state of the generators matters."""
    options = {**schedule, "num_train_epochs": 4, "restore_callback_states_from_checkpoint": restore}
    whole = Calibration(alm())
    trainer = trainer_for(whole, tmp_path, **options)
    trainer.train()
    resumed = Calibration(alm(initial_multiplier=0.5))  # not the value in the checkpoint
    again = trainer_for(resumed, tmp_path / "again", **options)
    torch.manual_seed(77)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{checkpoint}"))
    assert whole.loss.passes == resumed.loss.passes >= 4
    assert_identical(snapshot(resumed.loss), snapshot(whole.loss))
    assert_identical(snapshot(again.model), snapshot(trainer.model))
    assert resumed in again.callback_handler.callbacks


@pytest.mark.parametrize("key", ADAPTIVE)
def test_what_was_learned_is_written_and_read_exactly(key, tmp_path):
    weight = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float32)
    loss = create_loss(key, CLASSES, class_weight=weight)
    generator = torch.Generator().manual_seed(3)
    for _ in range(11):
        loss.observe(30 * torch.randn(50, CLASSES, generator=generator), torch.arange(50) % CLASSES)
        loss.adapt()
    state, arguments = TrainerState(global_step=0), TrainingArguments(str(tmp_path), eval_strategy="epoch")
    Calibration(loss).on_train_begin(arguments, state, TrainerControl())
    state.save_to_json(tmp_path / "state.json")
    fresh = create_loss(key, CLASSES, class_weight=[1.0, 1.0, 1.0])
    fresh.class_weight = fresh.class_weight.float()
    Calibration(fresh).on_train_begin(
        arguments, TrainerState.load_from_json(tmp_path / "state.json"), TrainerControl()
    )
    assert_identical(snapshot(fresh), snapshot(loss))
    assert {name: value.dtype for name, value in fresh.state_dict().items()} == {
        name: value.dtype for name, value in loss.state_dict().items()
    }


def test_a_loss_that_does_not_adapt_leaves_nothing_in_checkpoints(tmp_path):
    trainer = trainer_for(Calibration(create_loss("ce", CLASSES)), tmp_path, save_strategy="epoch")
    trainer.train()
    kept = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert "calibrant_loss" not in kept["stateful_callbacks"]


def test_checkpoints_without_the_loss_or_of_another_are_told(tmp_path):
    options = {"save_strategy": "epoch"}
    trainer_for(Calibration(create_loss("ce", CLASSES)), tmp_path / "ce", **options).train()
    trainer_for(Calibration(create_loss("adafocal", CLASSES)), tmp_path / "adafocal", **options).train()
    trainer = trainer_for(Calibration(alm()), tmp_path / "new", num_train_epochs=3)
    with pytest.warns(UserWarning, match="calibrant: the checkpoint was saved without Calibration"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "ce" / "checkpoint-4"))
    trainer = trainer_for(Calibration(alm()), tmp_path / "new")
    with pytest.raises(ValueError, match="of another loss than AugmentedLagrangian"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "adafocal" / "checkpoint-4"))


def test_every_trial_of_a_search_begins_with_a_fresh_loss(tmp_path):
    calibration = Calibration(alm())
    arguments = TrainingArguments(str(tmp_path), eval_strategy="epoch")
    trainer_for(calibration, tmp_path).train()
    learned = snapshot(calibration.loss)
    calibration.on_train_begin(arguments, TrainerState(), TrainerControl())
    assert_identical(snapshot(calibration.loss), learned)  # training continues with the state in memory
    calibration.on_train_begin(arguments, TrainerState(is_hyper_param_search=True), TrainerControl())
    assert_identical(snapshot(calibration.loss), snapshot(alm()))


# ---- Arguments that do not go together --------------------------------------------------------------


def test_arguments_that_would_have_no_effect_are_told(tmp_path):
    with pytest.warns(UserWarning, match="eval_strategy='no'"):
        trainer_for(Calibration(alm()), tmp_path, eval_strategy="no", max_steps=1).train()
    trainer_for(Calibration(create_loss("ce", 3)), tmp_path, eval_strategy="no", max_steps=1).train()
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1"):
        trainer_for(Calibration(alm()), tmp_path, label_smoothing_factor=0.1).train()


def test_training_that_ends_before_it_evaluates_is_told(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 9, "max_steps": 2}
    with pytest.warns(UserWarning, match="AugmentedLagrangian has not adapted, .* and eval_delay") as told:
        trainer_for(Calibration(alm()), tmp_path, **options).train()
    assert len(told) == 1
    trainer_for(Calibration(create_loss("ce", 3)), tmp_path, **options).train()


def test_training_that_adapts_only_after_its_last_step_is_told(tmp_path):
    calibration = Calibration(alm())
    with pytest.warns(
        AdaptationWarning, match="Lagrangian: .* only after the last training step.*eval_steps"
    ) as told:
        trainer_for(calibration, tmp_path, num_train_epochs=1).train()
    assert len(told) == 1
    trainer_for(calibration, tmp_path, num_train_epochs=1).train()  # with what it learned before
    options = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 4}
    trainer_for(Calibration(alm()), tmp_path, **options).train()
    trainer_for(Calibration(create_loss("ce", 3)), tmp_path, num_train_epochs=1).train()


def begin(calibration, tmp_path, **options):
    arguments = TrainingArguments(str(tmp_path), eval_strategy="epoch", save_strategy="epoch", **options)
    calibration.on_train_begin(arguments, TrainerState(), TrainerControl())


def test_a_best_model_by_a_loss_that_moves_is_told(tmp_path):
    with pytest.warns(UserWarning, match="cannot be compared between evaluations"):
        begin(Calibration(alm()), tmp_path, load_best_model_at_end=True)
    begin(Calibration(create_loss("ce", 3)), tmp_path, load_best_model_at_end=True)
    begin(Calibration(alm()), tmp_path, metric_for_best_model="nll", greater_is_better=False)


@pytest.mark.parametrize("name", ["nll", "eval_nll", "eval_validation_adaptive_ece"])
def test_a_direction_that_keeps_the_worst_model_is_refused(name, tmp_path):
    calibration = Calibration(alm(), learn_from="validation")
    with pytest.raises(ValueError, match=f"metric_for_best_model='{name}' needs greater_is_better=False"):
        begin(calibration, tmp_path, metric_for_best_model=name)
    with pytest.raises(ValueError, match="'accuracy' needs greater_is_better=True"):
        begin(calibration, tmp_path, metric_for_best_model="accuracy", greater_is_better=False)
    begin(calibration, tmp_path, metric_for_best_model="negative_nll")  # a metric of the user


def test_a_loss_without_effect_is_told_at_the_end_of_training(tmp_path):
    calibration = Calibration(create_loss("cals-alm", CLASSES, margin=1e6))
    trainer = trainer_for(calibration, tmp_path, num_train_epochs=3, eval_strategy="steps", eval_steps=1)
    with pytest.warns(AdaptationWarning, match="after 12 passes the penalty is still negligible") as caught:
        trainer.train()
    assert len(caught) == 1


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr"])
def test_a_short_training_tells_of_a_loss_without_effect(key, tmp_path):
    trainer = trainer_for(Calibration(create_loss(key, CLASSES, margin=1e6)), tmp_path, num_train_epochs=3)
    idle = "its penalty had no effect in 3 passes: .* Try a .* or train for longer"
    with pytest.warns(AdaptationWarning, match=idle) as caught:
        trainer.train()
    assert len(caught) == 1
    with warnings.catch_warnings(action="error"):
        calibration = Calibration(create_loss(key, CLASSES, margin=0.1))
        trainer_for(calibration, tmp_path, num_train_epochs=3).train()


def test_a_trainer_without_the_callback_is_told(tmp_path):
    calibration = Calibration(alm())
    trainer = trainer_for(calibration, tmp_path)
    trainer.remove_callback(calibration)
    with pytest.warns(UserWarning, match=r"will never adapt.*callbacks=\[calibration\]") as told:
        trainer.train()
    assert len(told) == 1


def test_several_gpus_in_one_process_are_refused(tmp_path):
    trainer = trainer_for(Calibration(alm()), tmp_path)
    trainer.args._n_gpu = 2
    state, control = TrainerState(), TrainerControl()
    with pytest.raises(ValueError, match=r"one process with 2 GPUs.*torchrun"):
        trainer.callback_handler.on_train_begin(trainer.args, state, control)


def test_a_trainer_that_does_not_use_the_loss_is_told(tmp_path):
    trainer = trainer_for(Calibration(alm()), tmp_path)
    trainer.compute_loss_func = None
    with pytest.raises(RuntimeError, match=r"compute_loss_func=calibration\.compute_loss"):
        trainer.train()


def test_an_evaluation_set_without_labels_is_told(tmp_path):
    unlabelled = [{"input_ids": row["input_ids"]} for row in sentences(4)]
    with pytest.raises(RuntimeError, match="nothing to learn from"):
        trainer_for(Calibration(alm()), tmp_path, evaluate=unlabelled).train()


def test_tasks_other_than_classification_are_refused(tmp_path):
    model = bert(problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=r"one class out of several.*create_loss\(\.\.\., 2, binary=True\)"):
        trainer_for(Calibration(alm()), tmp_path, model=model).train()
    calibration = Calibration(create_loss("ce", 2, binary=True))
    with pytest.raises(ValueError, match="the model is for regression"):
        trainer_for(calibration, tmp_path, model=bert(num_labels=1, problem_type="regression")).train()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    with pytest.raises(ValueError, match="LlamaForCausalLM predicts the next token"):
        trainer_for(Calibration(alm()), tmp_path, model=model).train()


# ---- Metrics ----------------------------------------------------------------------------------------

FIGURES = ["accuracy", "nll", "brier", "ece", "classwise_ece", "mce"]


def figures(logits, labels, **options):
    evaluation = calibrant.evaluate(logits, labels, resamples=0, **options)
    return {name: evaluation.metrics[name] for name in FIGURES}


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.clone], ids=["numpy", "torch"])
def test_metrics_are_those_of_an_evaluation(convert):
    calibration = Calibration(create_loss("ce", CLASSES), metrics=FIGURES)
    logits, labels = 3 * torch.randn(40, CLASSES), torch.randint(CLASSES, (40,))
    found = calibration.compute_metrics(EvalPrediction(convert(logits), convert(labels)))
    assert found == pytest.approx(figures(logits, labels))
    assert {type(value) for value in found.values()} == {float}
    again = calibration.compute_metrics(EvalPrediction((convert(logits), convert(logits)), convert(labels)))
    assert again == found  # the sums were reset; some models return more than logits
    batches = [[convert(part) for part in tensor.split(30)] for tensor in (logits, labels)]
    assert calibration.compute_metrics(EvalPrediction(*batches)) == pytest.approx(found)


def test_metrics_of_tokens_leave_out_what_trainer_filled_in():
    calibration = Calibration(create_loss("ce", CLASSES), metrics=FIGURES)
    logits, labels = torch.randn(10, 6, CLASSES), torch.randint(CLASSES, (10, 6))
    labels[:, 4:], logits[:, 5:] = -100, -100.0
    expected = figures(logits[:, :4].flatten(0, 1), labels[:, :4].flatten())
    found = calibration.compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))
    assert found == pytest.approx(expected)


def test_metrics_of_pixels_are_those_of_enlarged_logits_in_any_number_of_blocks(monkeypatch):
    calibration = Calibration(create_loss("ce", CLASSES), metrics=FIGURES)
    logits, labels = torch.randn(5, CLASSES, 4, 4), torch.randint(CLASSES, (5, 16, 16))
    expected = figures(interpolate(logits, (16, 16), mode="bilinear", align_corners=False), labels)
    for block in (1 << 24, 2 * CLASSES * 16 * 16, 1):
        monkeypatch.setattr("calibrant.integrations.transformers._BLOCK", block)
        found = calibration.compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))
        assert found == pytest.approx(expected)


def test_metrics_are_streamed_where_trainer_streams_them(tmp_path):
    found = []
    for streamed in (False, True):
        calibration = Calibration(create_loss("ce", CLASSES), metrics=FIGURES)
        trainer = trainer_for(calibration, tmp_path, model=bert(), measure=True, batch_eval_metrics=streamed)
        metrics = trainer.evaluate()
        found.append([metrics[f"eval_{name}"] for name in FIGURES])
        metrics = trainer.predict(sentences(7, seed=1)).metrics
        found.append([metrics[f"test_{name}"] for name in FIGURES])
    for other in found[1:]:
        assert other == pytest.approx(found[0])


def test_a_stream_that_was_interrupted_is_not_continued(tmp_path):
    calibration = Calibration(create_loss("ce", CLASSES))
    trainer = trainer_for(calibration, tmp_path, measure=True, batch_eval_metrics=True)
    expected = trainer.evaluate()["eval_nll"]

    class AfterABatch(TrainerCallback):
        seen = 0

        def on_prediction_step(self, *arguments, **rest):
            self.seen += 1
            if self.seen == 2:
                raise KeyboardInterrupt

    interrupting = AfterABatch()
    trainer.add_callback(interrupting)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(sentences(20, seed=9))
    trainer.remove_callback(interrupting)
    assert trainer.evaluate()["eval_nll"] == expected


def test_what_the_model_was_trained_with_is_logged(tmp_path):
    calibration, before = Calibration(alm()), []

    class Noting(TrainerCallback):
        def on_step_begin(self, *arguments, **rest):
            before.append(calibration.loss.multiplier.mean().item())

    trainer = trainer_for(calibration, tmp_path, callbacks=[Noting()], measure=True, num_train_epochs=3)
    trainer.train()
    logged = [entry["eval_multiplier_mean"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert logged == before[3::4]  # of the last of four steps before each evaluation
    assert logged[0] < logged[1]
    assert trainer.evaluate()["eval_multiplier_mean"] == calibration.loss.multiplier.mean().item()


def test_all_that_was_learned_is_logged():
    """The mean of offsets is 0 by construction."""
    calibration = Calibration(create_loss("ada-scale", 3))
    logits, labels = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(30).long()
    calibration.loss.observe(logits, labels)
    calibration.loss.adapt()
    figures = calibration.compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))
    offset = calibration.loss.offset
    assert figures["offset_mean"] == pytest.approx(0, abs=1e-12)
    assert (figures["offset_min"], figures["offset_max"]) == (offset.min(), offset.max())
    assert figures["offset_min"] < -0.01 < 0.01 < figures["offset_max"]
    assert figures["scale"] == calibration.loss.scale
    assert figures["passes"] == 1
