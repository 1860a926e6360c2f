import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrant import layout
from calibrant.layout import along_classes, arrange, as_logits, blocks, computing_dtype

CPU = torch.device("cpu")


def labels(*shape, classes=3):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % classes


def as_rows(tensor):
    """(B, K, *S) as (N, K), the slow and obvious way."""
    return tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


def assert_same_elements(elements, logits, target):
    """`elements` holds exactly the elements of the batch, in order, in its documented shapes."""
    assert elements.valid.shape == elements.logits.shape[:1] + elements.logits.shape[2:]
    assert elements.valid.dtype == torch.bool
    torch.testing.assert_close(as_rows(elements.logits), as_rows(logits), rtol=0, atol=0)
    if target.is_floating_point():
        assert elements.target.shape == elements.logits.shape
        torch.testing.assert_close(as_rows(elements.target), as_rows(target), rtol=0, atol=0)
    else:
        assert elements.target.shape == elements.valid.shape
        assert elements.target.dtype == torch.int64
        assert elements.target.reshape(-1).tolist() == target.reshape(-1).tolist()


# ---------------------------------------------------------------------------------------------- views


def test_rows_are_the_callers_own():
    logits, target = torch.randn(4, 3), labels(4)
    elements = arrange(logits, target)
    assert elements.logits is logits
    assert_same_elements(elements, logits, target)


def test_contiguous_images_are_a_view():
    logits, target = torch.randn(2, 3, 4, 5), labels(2, 4, 5)
    elements = arrange(logits, target)
    assert elements.logits.shape == (2, 3, 20)
    assert elements.logits.data_ptr() == logits.data_ptr()
    assert_same_elements(elements, logits, target)


def test_channels_last_images_are_a_view_of_rows():
    logits = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    target = labels(2, 4, 5)
    elements = arrange(logits, target)
    assert elements.logits.shape == (40, 3)
    assert elements.logits.is_contiguous()
    assert elements.logits.data_ptr() == logits.data_ptr()
    assert elements.logits.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    assert_same_elements(elements, logits, target)


def test_transposed_sequences_are_a_view_of_rows():
    tokens = torch.randn(2, 7, 3)
    target = labels(2, 7)
    elements = arrange(tokens.transpose(1, 2), target)
    assert elements.logits.shape == (14, 3)
    assert elements.logits.data_ptr() == tokens.data_ptr()
    torch.testing.assert_close(elements.logits, tokens.reshape(14, 3), rtol=0, atol=0)
    assert_same_elements(elements, tokens.transpose(1, 2), target)


def test_three_spatial_axes():
    logits, target = torch.randn(2, 3, 2, 3, 4), labels(2, 2, 3, 4)
    assert_same_elements(arrange(logits, target), logits, target)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_crops(memory_format):
    logits = torch.randn(2, 3, 6, 7).to(memory_format=memory_format)[:, :, 1:-1, 2:-1]
    target = labels(2, 6, 7)[:, 1:-1, 2:-1]
    assert not logits.is_contiguous()
    assert not target.is_contiguous()
    assert_same_elements(arrange(logits, target), logits, target)


def test_cropped_rows_and_classes():
    logits, target = torch.randn(8, 6)[::2, 1:4], labels(8)[::2]
    assert not logits.is_contiguous()
    assert_same_elements(arrange(logits, target), logits, target)


def test_one_pixel_images():
    logits, target = torch.randn(4, 3, 1, 1), labels(4, 1, 1)
    assert_same_elements(arrange(logits, target), logits, target)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 5), (2, 3, 0, 5), (0, 3, 7)])
def test_empty_batches(shape):
    logits, target = torch.empty(shape), torch.empty(shape[:1] + shape[2:], dtype=torch.int64)
    elements = arrange(logits, target, num_classes=3)
    assert elements.logits.shape[1] == 3
    assert elements.logits.numel() == 0
    assert_same_elements(elements, logits, target)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_reach_the_callers_logits(memory_format):
    logits = torch.randn(2, 3, 4, 5).to(memory_format=memory_format).requires_grad_()
    weights = torch.randn(2, 3, 4, 5)
    elements = arrange(logits, labels(2, 4, 5))
    as_rows(elements.logits).mul(as_rows(weights)).sum().backward()
    torch.testing.assert_close(logits.grad, weights, rtol=0, atol=0)


# --------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 4, 5)])
def test_ignored_labels(shape):
    target = labels(*shape[:1], *shape[2:])
    ignored = torch.zeros_like(target, dtype=torch.bool)
    ignored.view(-1)[::2] = True
    elements = arrange(torch.randn(shape), target.masked_fill(ignored, -100))
    assert elements.valid.reshape(-1).tolist() == (~ignored).reshape(-1).tolist()
    assert elements.target.reshape(-1).tolist() == target.masked_fill(ignored, 0).reshape(-1).tolist()
    assert not elements.all_valid


def test_all_valid_is_known_where_nothing_is_ignored():
    elements = arrange(torch.randn(4, 3), labels(4))
    assert elements.all_valid
    assert elements.valid.all()


@pytest.mark.parametrize("ignore_index", [-1, 0, 1, 255])
def test_any_label_can_be_the_ignored_one(ignore_index):
    target = torch.tensor([0, 1, 2, ignore_index])
    elements = arrange(torch.randn(4, 3), target, ignore_index=ignore_index)
    assert elements.valid.tolist() == [label != ignore_index for label in target.tolist()]
    assert elements.target.tolist() == [0 if label == ignore_index else label for label in target.tolist()]


def test_everything_ignored():
    elements = arrange(torch.randn(4, 3), torch.full((4,), -100))
    assert not elements.valid.any()
    assert elements.target.tolist() == [0, 0, 0, 0]


def test_ignored_labels_do_not_write_to_the_callers_target():
    target = torch.tensor([0, -100, 2])
    arrange(torch.randn(3, 3), target)
    assert target.tolist() == [0, -100, 2]


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"])
def test_integer_types(dtype):
    dtype = getattr(torch, dtype)
    elements = arrange(torch.randn(4, 3), labels(4).to(dtype))
    assert elements.target.dtype == torch.int64
    assert elements.target.tolist() == [0, 1, 2, 0]


def test_uint8_masks_with_255_ignored():
    target = torch.tensor([[0, 255], [2, 1]], dtype=torch.uint8)
    elements = arrange(torch.randn(2, 3, 2), target, ignore_index=255)
    assert elements.valid.tolist() == [[True, False], [True, True]]
    assert elements.target.tolist() == [[0, 0], [2, 1]]


@pytest.mark.parametrize(("dtype", "label"), [(torch.uint8, 156), (torch.uint8, 255), (torch.int8, 120)])
def test_labels_of_8_bits_with_more_classes_than_those_hold(dtype, label):
    target = torch.tensor([label, 3]).to(dtype)
    for all_seen in (False, True):
        elements = arrange(torch.randn(2, 1000), target).with_changes(checked=all_seen, all_valid=False)
        assert elements.target.tolist() == [label, 3]
        assert elements.valid.all()
        assert not elements.stray.any()


# -------------------------------------------------------------------------------- probability targets


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_probability_targets_follow_the_logits_layout(memory_format):
    logits = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
    target = torch.rand(2, 3, 4, 5).softmax(1)
    elements = arrange(logits, target, soft=True)
    assert elements.soft
    assert elements.all_valid
    assert elements.valid.all()
    assert_same_elements(elements, logits, target)


@pytest.mark.parametrize(
    ("logits_dtype", "target_dtype", "expected"),
    [
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
    ],
)
def test_probability_targets_take_the_computing_type(logits_dtype, target_dtype, expected):
    logits = torch.zeros(4, 2, dtype=logits_dtype)
    elements = arrange(logits, torch.full((4, 2), 0.5, dtype=target_dtype), soft=True)
    assert elements.target.dtype == expected == computing_dtype(logits)
    assert elements.logits.dtype == logits_dtype


def test_labels_are_welcome_where_probabilities_are():
    assert not arrange(torch.randn(4, 3), labels(4), soft=True).soft


# --------------------------------------------------------------------------------------------- errors


def message(*parts):
    """A pattern for these parts in this order, whatever stands between them."""
    return ".*".join(re.escape(part) for part in parts)


def test_wrong_number_of_classes():
    with pytest.raises(ValueError, match=message("(4, 3)", "3 classes", "num_classes=5")) as caught:
        arrange(torch.randn(4, 3), labels(4), num_classes=5)
    assert "movedim" not in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 7, 5), (2, 4, 4, 5)])
def test_classes_on_the_last_axis_get_a_hint(shape):
    with pytest.raises(ValueError, match=message(str(shape), "num_classes=5", "logits.movedim(-1, 1)")):
        arrange(torch.randn(shape), labels(*shape[:-1]), num_classes=5)
    arrange(torch.randn(shape).movedim(-1, 1), labels(*shape[:-1]), num_classes=5)  # the advice is good


@pytest.mark.parametrize(
    ("logits_shape", "target_shape", "expected_shape"),
    [
        ((4, 3), (5,), (4,)),
        ((4, 3), (4, 1), (4,)),
        ((4, 3), (4, 3), (4,)),
        ((4, 3), (), (4,)),
        ((2, 3, 4, 5), (2, 5, 4), (2, 4, 5)),
        ((2, 3, 4, 5), (2, 1, 4, 5), (2, 4, 5)),
        ((2, 3, 4, 5), (2, 20), (2, 4, 5)),
    ],
)
def test_wrong_target_shape(logits_shape, target_shape, expected_shape):
    wanted = message(str(expected_shape), str(logits_shape), f"got {target_shape}")
    with pytest.raises(ValueError, match=wanted):
        arrange(torch.randn(logits_shape), torch.zeros(target_shape, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(6, 7), (2, 7, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_one_hot_labels_get_a_hint_before_any_other(shape, dtype):
    classes = torch.arange(torch.Size(shape).numel() // 7).reshape(shape[0], *shape[2:]) % 7
    target = torch.nn.functional.one_hot(classes, 7).movedim(-1, 1).to(dtype)
    wanted = message("the target looks one-hot: pass target.long().argmax(1)")
    with pytest.raises((TypeError, ValueError), match=wanted) as caught:
        arrange(torch.randn(shape), target)
    assert "binary" not in str(caught.value).partition("one-hot")[0]
    assert arrange(torch.randn(shape), target.long().argmax(1)).labels.tolist() == classes.flatten().tolist()
    target[0, :2] = 1  # two labels of one element
    with pytest.raises((TypeError, ValueError)) as caught:
        arrange(torch.randn(shape), target)
    assert "one-hot" not in str(caught.value)


@pytest.mark.parametrize("shape", [(6, 56, 56, 7), (2, 9, 5)])
def test_classes_on_the_last_axis_get_a_hint_from_the_target(shape):
    with pytest.raises(ValueError, match=message("target must have shape", "logits.movedim(-1, 1)")):
        arrange(torch.randn(shape), labels(*shape[:-1]))


def test_labels_that_count_from_1_get_a_hint():
    hint = message("from 1 to 3", "if the labels count from 1, pass target - 1")
    with pytest.raises(ValueError, match=hint):
        arrange(torch.randn(4, 3), torch.tensor([1, 2, 3, 1]))
    for others in ([0, 2, 3, 1], [1, 2, 4, 1]):
        with pytest.raises(ValueError, match="target holds labels") as caught:
            arrange(torch.randn(4, 3), torch.tensor(others))
        assert "count from 1" not in str(caught.value)


@pytest.mark.parametrize(("bad", "low", "high"), [(3, 0, 3), (1000, 0, 1000), (-1, -1, 2), (-101, -101, 2)])
@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 3)])
def test_labels_out_of_range(bad, low, high, ignoring, shape):
    target = torch.tensor([0, 1, 2, bad, 0, -100 if ignoring else 1]).reshape(shape[0], *shape[2:])
    wanted = message(f"from {low} to {high}", str(shape), "3 classes", "0 to 2", "ignore_index=-100")
    with pytest.raises(ValueError, match=wanted):
        arrange(torch.randn(shape), target)


def test_the_old_ignore_index_is_an_error_under_a_new_one():
    with pytest.raises(ValueError, match=message("from -100 to 1", "ignore_index=255")):
        arrange(torch.randn(3, 3), torch.tensor([-100, 1, 255]), ignore_index=255)


def test_probability_targets_where_they_have_no_form():
    with pytest.raises(TypeError, match=message("integer labels", "torch.float32", "(4, 3)")):
        arrange(torch.randn(4, 3), torch.rand(4, 3))


@pytest.mark.parametrize("soft", [False, True])
def test_float_labels(soft):
    error, wanted = (
        (ValueError, message("(4, 3)", "got (4,)", "for labels pass target.long()"))
        if soft
        else (TypeError, message("integer labels", "torch.float32", "(4,)"))
    )
    with pytest.raises(error, match=wanted):
        arrange(torch.randn(4, 3), labels(4).float(), soft=soft)


def test_probability_target_of_another_shape():
    with pytest.raises(ValueError, match=message("(2, 3, 4, 5)", "got (2, 4, 5, 3)")):
        arrange(torch.randn(2, 3, 4, 5), torch.rand(2, 4, 5, 3), soft=True)


def test_probability_targets_outside_of_0_to_1():
    target = torch.tensor([[2.0, -2.0, 1.0]])
    with pytest.raises(ValueError, match=message("must lie in [0, 1], got values from -2 to 2")):
        arrange(torch.randn(1, 3), target, soft=True)
    arrange(torch.randn(1, 3), torch.tensor([[1.001, -0.001, 0.0]]), soft=True)  # rounding


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
@pytest.mark.parametrize("soft", [False, True])
def test_targets_of_no_use(dtype, soft):
    with pytest.raises(TypeError, match=message("integer labels", str(dtype))):
        arrange(torch.randn(4, 3), torch.zeros(4, dtype=dtype), soft=soft)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_logits_that_are_not_floating_point(dtype):
    with pytest.raises(TypeError, match=message("logits must be floating point", str(dtype))):
        arrange(torch.zeros(4, 3, dtype=dtype), labels(4))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_logits_without_a_class_axis(shape):
    with pytest.raises(ValueError, match=message("(B, K, *S)", f"got {shape}")):
        arrange(torch.zeros(shape), labels(3))


def test_devices_that_differ():
    with pytest.raises(ValueError, match=message("target is on meta", "logits are on cpu")):
        arrange(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64, device="meta"))


# ------------------------------------------------------------------------------------ class-axis shapes


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float64, torch.float64), (torch.float16, torch.float32)]
)
def test_values_along_classes(dtype, expected):
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    flat, dense = torch.zeros(4, 3, dtype=dtype), torch.zeros(4, 3, 5, dtype=dtype)
    assert along_classes(values, flat).shape == (1, 3)
    assert along_classes(values, dense).shape == (1, 3, 1)
    assert along_classes(values, dense).dtype == expected
    assert (dense + along_classes(values, dense))[2, :, 3].tolist() == [1.0, 2.0, 3.0]


def test_elements_compare_by_identity():
    elements = arrange(torch.randn(4, 3), labels(4))
    assert elements != replace(elements)  # a fieldwise == of tensors would be ambiguous


# --------------------------------------------------------------------------------------------- blocks


def visits(shape, device=CPU):
    """How often each number is visited, and how many numbers each block has."""
    count = np.zeros(shape, dtype=np.int64)
    sizes = []
    for index in blocks(shape, device):
        count[index] += 1
        sizes.append(count[index].size)
        # every expression keeps the class axis whole and works on one number per element as well
        assert count[index].shape[1] == shape[1]
        assert np.zeros((shape[0], 1, *shape[2:]))[index].size * shape[1] == sizes[-1]
    return count, sizes


SHAPES = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 12)),
    st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(0, 40)),
)


@settings(deadline=None)
@given(SHAPES)
def test_one_block_suffices_for_small_batches(shape):
    count, sizes = visits(shape)
    assert (count == 1).all()
    assert len(sizes) == 1


@settings(deadline=None, max_examples=300)
@given(SHAPES, st.integers(1, 200))
def test_blocks_cover_every_number_once(shape, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_CPU_BLOCK", limit)
        count, sizes = visits(shape)
    assert (count == 1).all()
    assert len(sizes) >= 1
    assert max(sizes) <= max(limit, shape[1])  # at least one element at a time, otherwise within the limit


@settings(deadline=None)
@given(SHAPES, st.integers(1, 200))
def test_device_blocks_cover_every_number_once(shape, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_DEVICE_BLOCK", limit)
        count, sizes = visits(shape, torch.device("cuda"))
    assert (count == 1).all()
    assert max(sizes) <= max(limit, shape[1])


@pytest.mark.parametrize(
    ("shape", "limit", "sizes"),
    [
        ((7, 5), 15, [15, 15, 5]),  # three rows at a time, then the one that is left
        ((7, 5), 4, [5] * 7),  # a row is never cut
        ((3, 5, 7), 70, [70, 35]),  # two images, then one
        ((2, 5, 7), 15, [15, 15, 5] * 2),  # an image in columns
        ((0, 5), 15, [0]),
        ((0, 5, 7), 15, [0]),
    ],
)
def test_block_sizes(shape, limit, sizes, monkeypatch):
    monkeypatch.setattr(layout, "_CPU_BLOCK", limit)
    assert visits(shape)[1] == sizes


def test_large_batches_are_cut_by_default():
    assert len(list(blocks((100_000, 100), CPU))) > 10
    assert len(list(blocks((4, 20, 512 * 512), CPU))) > 10
    assert len(list(blocks((100_000, 100), torch.device("cuda")))) == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_low_logits_in_16_bits_are_no_zeros(kind: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -87.5], [0.0, -87.0], [-87.3125, 0.0]], dtype=kind)
    elements = arrange(logits, torch.tensor([1, 1, 0]))
    assert elements.ruled_out.tolist() == [False] * 3
    assert arrange(as_logits(torch.tensor([[1.0, 0.0]])), torch.tensor([1])).ruled_out.tolist() == [True]
