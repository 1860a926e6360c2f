"""Run a program where the tests make torchvision importable: python -m tests.example FILE."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
