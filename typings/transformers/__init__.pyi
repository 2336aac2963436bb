# The names that this project takes from the top of transformers. Its own `__init__` imports every model there is, which
# takes pyright 20 seconds to read.
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessor as LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper as TemperatureLogitsWarper
from transformers.generation.logits_process import TopKLogitsWarper as TopKLogitsWarper
from transformers.generation.logits_process import TopPLogitsWarper as TopPLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteria as StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria as StopStringCriteria
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText as AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.utils.quantization_config import GgufConfig as GgufConfig

__version__: str
