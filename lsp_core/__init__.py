"""The method: tensor math on torch modules, and the compressed model class.

Importing this package makes the Auto classes of transformers load compressed checkpoints.
"""

import transformers

from lsp_core.modeling_lsp import CLASSES, LSPConfig

transformers.AutoConfig.register(LSPConfig.model_type, LSPConfig, exist_ok=True)
for _class in CLASSES.values():
    getattr(transformers, str(_class._auto_class)).register(LSPConfig, _class, exist_ok=True)
