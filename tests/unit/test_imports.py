"""What importing the model brings along."""

import subprocess
import sys


def test_name_tables_do_not_import_transformers() -> None:
    code = (
        "import sys, modeling.families.weights, modeling.families.config_json, modeling.counts, modeling.generate\n"
        "print({'transformers', 'deepspeed', 'tokenizers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
