"""Checkpoints that any mesh, and one device, can load."""

from lightning_parallel.checkpoint.consolidate import consolidate as consolidate
from lightning_parallel.checkpoint.model import load_model_state_dict as load_model_state_dict
from lightning_parallel.checkpoint.model import model_state_dict as model_state_dict
from lightning_parallel.checkpoint.model import to_host as to_host
from lightning_parallel.checkpoint.optimizer import load_optimizer_state_dict as load_optimizer_state_dict
from lightning_parallel.checkpoint.optimizer import optimizer_state_dict as optimizer_state_dict
from lightning_parallel.checkpoint.sharded import lay_out as lay_out
from lightning_parallel.checkpoint.sharded import load_sharded as load_sharded
from lightning_parallel.checkpoint.sharded import save_sharded as save_sharded
from lightning_parallel.checkpoint.stages import collect_stages as collect_stages
from lightning_parallel.checkpoint.storage import is_sharded_checkpoint as is_sharded_checkpoint
from lightning_parallel.checkpoint.storage import read_file as read_file
from lightning_parallel.checkpoint.storage import remove as remove
