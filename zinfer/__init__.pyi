from zinfer.api import LLM as LLM
from zinfer.api import SamplingParams as SamplingParams
from zinfer.api import plan as plan
from zinfer.api import results as results
from zinfer.api import sweep as sweep

__version__: str
