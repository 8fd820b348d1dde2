from .base import Incomplete as Incomplete
from .base import PenstockError as PenstockError
from .base import Refused as Refused
from .base import StageError as StageError
from .base import UsageError as UsageError
from .data import Box as Box
from .data import open_sink as open_sink
from .data import open_source as open_source
from .inference import Plan as Plan
from .inference import Progress as Progress
from .inference import Summary as Summary
from .inference import plan_inference as plan_inference
from .inference import run_inference as run_inference
from .loading import Loader as Loader
from .training import run_training as run_training

__version__: str
