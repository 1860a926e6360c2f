"""Files of an ensemble's members, read side by side."""

import numpy as np
import pytest
import torch

from calibrant.ensembles import pool
from calibrant.predictions import BadFileError, open_ensemble, open_predictions, write_predictions

ROWS, K = 30, 3
LOGITS = torch.randn(3, ROWS, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.randint(K, (ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def members(tmp_path):
    """An npz file, a csv file and a folder of uneven shards."""
    np.savez(tmp_path / "a.npz", logits=LOGITS[0], labels=LABELS)
    rows = [
        ",".join(map(repr, [label, *row]))
        for label, row in zip(LABELS.tolist(), LOGITS[1].tolist(), strict=True)
    ]
    (tmp_path / "b.csv").write_text("\n".join(["label,logit_0,logit_1,logit_2", *rows]))
    (tmp_path / "c").mkdir()
    for number, part in enumerate((slice(0, 7), slice(7, 8), slice(8, None))):
        np.savez(tmp_path / "c" / f"{number}.npz", logits=LOGITS[2][part], labels=LABELS[part])
    return [tmp_path / "a.npz", tmp_path / "b.csv", tmp_path / "c"]


@pytest.mark.parametrize("chunk", [1, 20, 36, 10_000])
def test_logits_are_pooled(members, chunk):
    seen = []
    file = open_ensemble(members, watch=lambda logits, labels: seen.append((logits, labels)))
    assert (file.kind, file.shape, file.class_names) == ("logits", (ROWS, K), ("0", "1", "2"))
    assert len(file.files) == 5
    batches = list(file.batches(chunk=chunk))
    torch.testing.assert_close(torch.cat([logits for logits, _ in batches]), pool(LOGITS))
    assert torch.equal(torch.cat([labels for _, labels in batches]), LABELS)
    assert torch.equal(torch.cat([logits for logits, _ in seen], 1), LOGITS)


def test_pooled_logits_can_be_stored(tmp_path, members):
    file = open_ensemble(members)
    write_predictions(tmp_path / "pooled.npz", file.batches(), file.rows)
    torch.testing.assert_close(open_predictions(tmp_path / "pooled.npz").load()[0], pool(LOGITS))


def test_members_that_do_not_belong_together(tmp_path, members):
    def refused(words, **changes):
        np.savez(tmp_path / "x.npz", **{"logits": LOGITS[0], "labels": LABELS, **changes})
        with pytest.raises(BadFileError, match=words):
            open_ensemble([*members, tmp_path / "x.npz"]).load()

    labels = LABELS.clone()
    labels[17] = (labels[17] + 1) % K
    refused(r"x\.npz: has another label than .*a\.npz at row 18", labels=labels)
    refused("rows of shape", logits=LOGITS[0].repeat(1, 2))
    refused(r"x\.npz: has 20 rows", logits=LOGITS[0][:20], labels=LABELS[:20])
    refused("more", logits=LOGITS[0].repeat(2, 1), labels=LABELS.repeat(2))
    refused("other class names", class_names=np.array(["a", "b", "c"]))
    with pytest.raises(ValueError, match="at least two"):
        open_ensemble(members[:1])
