"""Import the public names of `manyhands` from their modules."""

from manyhands._ranks.dry_run import dry_run as dry_run
from manyhands.blocks._methods import BMUF as BMUF
from manyhands.blocks._methods import DiLoCo as DiLoCo
from manyhands.blocks._methods import LocalSGD as LocalSGD
from manyhands.blocks._methods import SlowMo as SlowMo
from manyhands.blocks._optimizer import Blocks as Blocks
from manyhands.blocks._schedule import Seconds as Seconds
from manyhands.blocks.crew._crew import Crew as Crew
from manyhands.checkpoint import load as load
from manyhands.checkpoint import save as save
from manyhands.checkpoint.weights import load_weights as load_weights
from manyhands.checkpoint.weights import save_weights as save_weights
from manyhands.data._make import Cursor as Cursor
from manyhands.data._order import DataShards as DataShards
from manyhands.engines._job import start as start
from manyhands.engines._stopping import stopping as stopping
from manyhands.ramp import Ramp as Ramp
from manyhands.ramp import largest_micro_batch as largest_micro_batch
from manyhands.scaling._noise_scale import NoiseScale as NoiseScale
from manyhands.scaling._progress import ProgressScheduler as ProgressScheduler
from manyhands.scaling._rules import AdamScale as AdamScale
from manyhands.scaling._rules import AdaScale as AdaScale
from manyhands.scaling._rules import LEGWScale as LEGWScale
from manyhands.scaling._rules import LinearScale as LinearScale
from manyhands.scaling._rules import SqrtScale as SqrtScale
from manyhands.scaling._weighted_mean import WeightedMean as WeightedMean
from manyhands.sharding._gradients import ShardedGradScaler as ShardedGradScaler
from manyhands.sharding.fsdp._whole_tensors import WholeTensorOptimizer as WholeTensorOptimizer
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel as FullyShardedDataParallel
from manyhands.sharding.zero._ddp import ShardedDataParallel as ShardedDataParallel
from manyhands.sharding.zero._oss import OSS as OSS
from manyhands.tools.plan import plan as plan
from manyhands.tools.plan import shard as shard
from manyhands.tools.record import Record as Record
from manyhands.tools.record import StepTiming as StepTiming
from manyhands.tools.record import read_record as read_record

FSDP = FullyShardedDataParallel
