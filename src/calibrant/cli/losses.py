"""`calibrant losses`: list the losses."""

from __future__ import annotations

import re
from inspect import getdoc

from calibrant.cli.program import say
from calibrant.cli.terminal import app, print_listing


@app.command()
def losses() -> None:
    """List the losses with their hyper-parameters."""
    from calibrant.losses import LOSSES, AdaptiveLoss, Loss
    from calibrant.options import written

    shared, rows = Loss.hyperparameters(), []
    for key, kind in LOSSES.items():
        own = [each for name, each in kind.hyperparameters().items() if name not in shared]
        options = ", ".join(f"{parameter.name}={written(parameter.default)}" for parameter in own)
        description = re.sub(r" \(key ``[^`]*``\)|`", "", (getdoc(kind) or "").split("\n", 1)[0])
        adaptive = " (adaptive)" if issubclass(kind, AdaptiveLoss) else ""
        rows.append((key, description + adaptive, options))
    print_listing(("key", "what it is", "hyper-parameters"), rows, folded=("what it is", "hyper-parameters"))
    say("Hyper-parameters go in brackets: --loss 'cals-alm[margin=6,penalty=p2]'.")
    say("Adaptive losses learn from validation data, as often as adapt= says: epoch, 100, 0:epoch/10:100.")
