"""Make PyPI's torchvision importable beside a CPU build of torch.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its extension does not load, and the import
fails with "operator torchvision::nms does not exist". timm, torchmetrics and transformers import torchvision
and fail with it. They need none of its detection operators, so it is enough to declare these two.

`make` copies this file into the site-packages of `.venv`, where a `.pth` file imports it whenever Python
starts. It imports nothing itself, and changes nothing where the extension loads.
"""

import sys


class DeclareOperators:
    """An import hook that acts once, after ``torchvision.extension`` and before the operators are needed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Declare the operators if torchvision has none; leave the import to the other finders."""
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(cls)
            if not sys.modules["torchvision.extension"]._has_ops():
                library = sys.modules["torch"].library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                cls.library = library  # a library that is deleted takes its operators with it


sys.meta_path.insert(0, DeclareOperators)
