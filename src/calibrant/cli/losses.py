"""`calibrant losses`: list the losses."""

from __future__ import annotations

import re
from inspect import getdoc

from calibrant.cli.terminal import Wide, app


@app.command()
def losses(wide: Wide = False) -> None:
    """List the losses with their hyper-parameters."""
    from calibrant.losses import LOSSES, AdaptiveLoss, Loss
    from calibrant.options import written
    from calibrant.reports.tables import listing, print_table

    shared, rows = Loss.hyperparameters(), []
    for key, kind in LOSSES.items():
        own = [each for name, each in kind.hyperparameters().items() if name not in shared]
        options = ", ".join(f"{parameter.name}={written(parameter.default)}" for parameter in own)
        description = re.sub(r" \(key ``[^`]*``\)|`", "", (getdoc(kind) or "").split("\n", 1)[0])
        adaptive = " (adaptive)" if issubclass(kind, AdaptiveLoss) else ""
        rows.append((key, description + adaptive, options))
    table = listing(rows, {"what it is": 2, "hyper-parameters": 1})
    note = (
        "p: probability of the true class, s: of all classes, q: of the best class below the true one; "
        "l: logits. Hyper-parameters go in brackets: --loss 'cals-alm[margin=6,penalty=p2]'. Adaptive losses "
        "learn from the validation data after every epoch, with --set adapt=100 after every 100 batches."
    )
    print_table(table, note, heading="key", wide=wide)
