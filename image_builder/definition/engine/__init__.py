"""The only interface to Ansible's Python API: inventories, origins of values, Vault, templates, argument specs.

Importing it costs about 0.3 s: commands import the definition only when they run, so that ``--help`` needn't.
Tags that carry a value's origin are internal to ansible-core 2.19; a unit test guards against changes to them.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from image_builder.definition.engine import caller  # removes the caller's settings
from image_builder.settings import REPO_ROOT, ansible_config, project_root

# Ansible reads its settings when it is first imported, which the modules below this package do. Child processes, plays
# among them, get an environment of their own.
os.environ["ANSIBLE_CONFIG"] = str(ansible_config((project_root(), REPO_ROOT)))
os.environ["ANSIBLE_DUPLICATE_YAML_DICT_KEY"] = "error"
os.environ["ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED"] = "true"
os.environ["ANSIBLE_LOCAL_TEMP"] = tempfile.gettempdir()

from image_builder.definition.engine.configuration import init_plugin_loader, settings
from image_builder.definition.engine.faults import Fault
from image_builder.definition.engine.inventories import Source, read_inventory, undecryptable
from image_builder.definition.engine.origins import (
    UnreadableError,
    decrypted_text,
    place_in,
    place_of,
    plain,
    read_untagged_yaml,
    read_yaml,
)
from image_builder.definition.engine.plays import (
    PlayReading,
    collection_folders,
    configured_inventories,
    configured_plugins,
    configured_roles,
    file_of_play,
    forget_plugins_of_this_machine,
    managed_text,
    plugin_settings,
    read_play,
    role_file,
    role_parameters,
    use_plugins_beside,
    variable_files,
)
from image_builder.definition.engine.reads import Reads, is_predictable
from image_builder.definition.engine.templates import (
    Evaluation,
    EvaluationError,
    Evaluator,
    UnpredictableValueError,
    argument_faults,
    evaluate_all,
)
from image_builder.definition.engine.volatile import volatile

__all__ = [
    "Evaluation",
    "EvaluationError",
    "Evaluator",
    "Fault",
    "PlayReading",
    "Reads",
    "Source",
    "UnpredictableValueError",
    "UnreadableError",
    "argument_faults",
    "caller",
    "collection_folders",
    "configured_inventories",
    "configured_plugins",
    "configured_roles",
    "decrypted_text",
    "evaluate_all",
    "file_of_play",
    "is_predictable",
    "managed_text",
    "place_in",
    "place_of",
    "plain",
    "plugin_settings",
    "read_inventory",
    "read_play",
    "read_untagged_yaml",
    "read_yaml",
    "role_file",
    "role_parameters",
    "undecryptable",
    "use_plugins_beside",
    "variable_files",
    "volatile",
]

# Ansible's directory for running modules, created on import and removed at exit: a killed process would leave it.
with suppress(OSError):
    Path(settings.DEFAULT_LOCAL_TMP).rmdir()
# Only the repository's own plugins and collections count, not others that the caller or this machine has installed.
forget_plugins_of_this_machine()
settings.COLLECTIONS_PATHS = [str(folder) for folder in collection_folders(project_root())]
settings.COLLECTIONS_SCAN_SYS_PATH = False
init_plugin_loader([])
