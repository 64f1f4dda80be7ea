"""Adapters of a vision tower and its projector, chosen by regular expressions."""

import dataclasses
import re
from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from jaxrl.models.config import LoRA
from jaxrl.models.lora import add_to_leaves
from jaxrl.models.quantize import matrix_inputs
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.tower import Tower, tower_specs
from sharding import Rules
