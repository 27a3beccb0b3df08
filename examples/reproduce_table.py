"""Run two of the k-tied paper's tables at the smallest scale, and print ours beside what the paper printed."""

import tempfile
from pathlib import Path

from slimbayes.lab.experiments import find, read_result
from slimbayes.lab.experiments.running import reproduce
from slimbayes.lab.experiments.tables import join, markdown


def main(names: tuple[str, ...] = ("ktied/table1", "ktied/table2"), scale: str = "smoke") -> dict[str, float]:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for experiment in names:
            path = reproduce(
                experiment, scale, results=folder / "results", work=folder / "work", progress=False
            )
            document, entry = read_result(path), find(experiment)
            print(f"## {entry.item}: {entry.title}\n\n{entry.shows}\n")
            for table in document["tables"]:
                print(f"{table['title']}\n\n{markdown(join(table, entry.table(table['name'])))}\n")
            for sentence in document["deviations"]:
                print(f"- {sentence}")
            print()
            for row in document["tables"][0]["rows"]:
                for column, values in row["values"].items():
                    found[f"{experiment}, {row['label']}, {column}"] = sum(values) / len(values)
    return found


if __name__ == "__main__":
    main()
