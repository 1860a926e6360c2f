"""Two workers run the tests on two cores: one thread each, or they wait for one another."""

import torch

torch.set_num_threads(1)
