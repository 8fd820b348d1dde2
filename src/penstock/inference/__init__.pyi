from .job import Job as Job
from .plan import Plan as Plan
from .run import plan_inference as plan_inference
from .run import run_inference as run_inference
from .run import run_job as run_job
from .summary import Progress as Progress
from .summary import Summary as Summary
