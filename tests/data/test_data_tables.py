"""CSV, Parquet and npz files of users: values, columns, tasks, splits and errors that name the cell."""

import numpy as np
import pytest
import torch
from PIL import Image

from slimbayes.lab.data import DataError, load, read_inputs, read_table

ROWS = "age,height,kind\n30,1.8,cat\n40,1.6,dog\n25,1.7,cat\n61,1.5,dog\n33,2.0,cat\n"


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="data.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def test_a_table_with_classes(write):
    data = load(write(ROWS), target="kind", test=0.4)
    assert data.task == "classification" and data.classes == ("cat", "dog") and data.name == "data"
    assert data.features == ("age", "height") and (len(data.train), len(data.test)) == (3, 2)
    rows = torch.cat([torch.cat([s.inputs, s.targets[:, None]], 1) for s in (data.train, data.test)])
    expected = {(30, 1.8, 0), (40, 1.6, 1), (25, 1.7, 0), (61, 1.5, 1), (33, 2.0, 0)}
    assert {tuple(round(v, 4) for v in row) for row in rows.tolist()} == expected
    again = load(write(ROWS), target="kind", test=0.4, seed=0)
    assert data.fingerprint() == again.fingerprint()


def test_columns_exclusions_and_regression(write):
    path = write(ROWS)
    data = load(path, target="height", columns=["age"])
    assert data.task == "regression" and data.features == ("age",) and data.outputs == ("height",)
    assert data.train.targets.shape == (4, 1) and data.target_scaling is not None
    assert load(path, target="height", exclude=["kind"]).features == ("age",)
    with pytest.raises(DataError, match=r"row 1, column 'kind': 'cat' is not a number: encode it"):
        load(path, target="height")
    with pytest.raises(DataError, match="no feature column is left"):
        load(path, target="height", exclude=["kind", "age"])
    with pytest.raises(DataError, match=r"say which column to predict with target=.*age, height, kind"):
        load(path)


def test_several_real_targets(write):
    data = load(write("a,b,c\n1,2,3\n4,5,6\n7,8,9\n"), target=["c", "a"])
    assert data.outputs == ("c", "a") and data.features == ("b",) and data.train.targets.shape[1] == 2
    with pytest.raises(DataError, match="classification has one target"):
        load(write("a,b,c\n1,2,3\n4,5,6\n7,8,9\n"), target=["c", "a"], task="classification")


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["0", "1", "0", "1"], "classification", ("0", "1")),
        (["10", "9", "10", "9"], "classification", ("9", "10")),
        (["0.5", "1.5", "2", "3"], "regression", ()),
        ([str(n) for n in range(21)], "regression", ()),
        ([str(n % 20) for n in range(40)], "classification", tuple(map(str, range(20)))),
        (["yes", "no", "no", "yes"], "classification", ("no", "yes")),
        (["-1", "+1", "-1", "1"], "classification", ("-1", "1")),
        (["1", "b", "1", "b"], "classification", ("1", "b")),
        (["--5", "4", "4", "--5"], "classification", ("--5", "4")),
    ],
)
def test_the_task_follows_from_the_target(write, values, task, classes):
    path = write("x,y\n" + "".join(f"{n},{v}\n" for n, v in enumerate(values)))
    data = load(path, target="y")
    assert (data.task, data.classes) == (task, classes)
    if all(c.lstrip("-").isdigit() and "--" not in c for c in classes):
        assert load(path, target="y", task="regression").task == "regression"


def test_options_as_text(write):
    assert (
        load(write(ROWS), target="kind", test="0.4").fingerprint()
        == load(write(ROWS), target="kind", test=0.4).fingerprint()
    )
    with pytest.raises(DataError, match="task='clasification': choose"):
        load(write(ROWS), target="kind", task="clasification")


def test_a_second_file_to_test_on(write):
    train = write(ROWS)
    test = write("kind,height,age,more\ndog,1.0,5,x\n", "test.csv")
    data = load(train, target="kind", test=test)
    assert (
        len(data.train) == 5
        and data.test.inputs.tolist() == [[5.0, 1.0]]
        and data.test.targets.tolist() == [1]
    )
    with pytest.raises(DataError, match=r"test\.csv: row 1, column 'kind': 'cow' is none of the training"):
        load(train, target="kind", test=write("kind,height,age\ncow,1.0,5\n", "test.csv"))
    with pytest.raises(DataError, match=r"test\.csv: no column 'age'"):
        load(train, target="kind", test=write("kind,height\ncow,1.0\n", "test.csv"))


@pytest.mark.parametrize("test", [0, 1.0, -0.5, 2])
def test_a_fraction_is_between_zero_and_one(write, test):
    with pytest.raises(DataError, match=f"test={test}"):
        load(write(ROWS), target="kind", test=test)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ("a,b\n", r"a header \(a, b\) but no rows"),
        ("a,b\n1,2\n3\n", "line 3 has 1 values, the header has 2"),
        ("a,b\n1,2,3\n", "line 2 has 3 values"),
        ("a,a\n1,2\n", "column name 'a' occurs 2 times"),
        ("a,,b\n1,2,3\n", "column 2 has no name"),
        ("a,b\n1,x\n", r"row 1, column 'b': 'x' is not a number"),
        ("a,b\n1,2\n\n3,x\n", r"row 2 \(line 4\), column 'b': 'x'"),
        (
            "a,b\n1,2\n\n3,\n",
            r"1 missing value in 1 of the columns, the first in row 2 \(line 4\), column 'b'",
        ),
        ("a,b\n1,2\n,\n3,4\n", "2 missing values in 2 of the columns, the first in row 2, column 'a'"),
        ("a,b\n1,NA\nnan,?\n", r"3 missing values in 2 of the columns, the first in row 1, column 'b': drop"),
        ("a,b\n1,inf\n", r"column 'b': 'inf' is not a finite"),
        ("a,b\n1,1e300\n", r"column 'b': '1e300' is not a finite"),
        ("a;b\n1;2,5\n", r"'2,5' is not a number: write a decimal point"),
        (b"a,b\n1,\xff\n", "byte 6 is not UTF-8"),
        ("a,b\n1,2\n".encode("utf-16-le"), "zero bytes"),
        ('a,b\n1,"2\n', "unexpected end of data"),
    ],
)
def test_damaged_csv(write, text, message):
    with pytest.raises(DataError, match=message):
        read_table(write(text), ["a", "b"])


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,2\n3,4\n",
        "\ufeffa,b\r\n1,2\r\n3,4",
        "a;b\n1;2\n3;4\n",
        "a\tb\n1\t2\n3\t4\n",
        "a|b\r1|2\r3|4\r",
        ' a , "b" \n1, 2\n\n3,4\n'.replace('"b"', "b"),
        '"a","b"\n"1","2"\n"3","4"\n',
        'a,b,"c,d;;;"\n1,2,"x\ny"\n3,4,z\n',
        "b,a\n2,1\n4,3\n",
    ],
)
def test_csv_dialects(write, text):
    values, names = read_table(write(text), ["a", "b"])
    assert (
        values.tolist() == [[1.0, 2.0], [3.0, 4.0]] and names == ("a", "b") and values.dtype == torch.float32
    )


def test_one_column_and_blank_lines(write):
    assert read_table(write("a\n1\n2\n\n \n"), ["a"])[0].tolist() == [[1.0], [2.0]]
    with pytest.raises(DataError, match="line 3 is empty"):  # else the rows after it would move up
        read_table(write("a\n1\n\n2\n"), ["a"])


def test_words_for_truth_and_numbers_in_text(write):
    values, _ = read_table(write("a,b\ntrue,1e3\nFalse, -2.5 \n"), ["a", "b"])
    assert values.tolist() == [[1.0, 1000.0], [0.0, -2.5]]


def test_missing_columns_are_suggested(write):
    path = write(ROWS)
    with pytest.raises(
        DataError, match=r"no column 'hight' \(did you mean 'height'\?\); it has age, height, kind"
    ):
        read_table(path, ["age", "hight"])
    with pytest.raises(DataError, match="no column 'Kind'"):
        load(path, target="Kind")
    with pytest.raises(DataError, match="no column 'ages'"):
        load(path, target="kind", exclude=["ages"])
    with pytest.raises(DataError, match="no such file"):
        read_table(path.with_name("other.csv"), ["age"])


def test_targets_that_miss_or_do_not_vary(write):
    with pytest.raises(DataError, match="row 2, column 'y': the target is missing"):
        load(write("x,y\n1,a\n2,\n3,b\n"), target="y")
    with pytest.raises(DataError, match=r"one value only \(a\)"):
        load(write("x,y\n1,a\n2,a\n"), target="y")


def test_parquet_equals_csv(write, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "age": [30, 40, 25, 61, 33],
        "height": [1.8, 1.6, 1.7, 1.5, 2.0],
        "kind": ["cat", "dog", "cat", "dog", "cat"],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "data.parquet")
    ours = load(tmp_path / "data.parquet", target="kind", test=0.4)
    theirs = load(write(ROWS), target="kind", test=0.4)
    assert ours.fingerprint() == theirs.fingerprint() and ours.classes == theirs.classes
    flags = arrow.table({"a": [True, False], "b": [1, None], "c": ["x", "y"]})
    parquet.write_table(flags, tmp_path / "flags.parquet")
    assert read_table(tmp_path / "flags.parquet", ["a"])[0].tolist() == [[1.0], [0.0]]
    with pytest.raises(DataError, match=r"1 missing value .* row 2, column 'b'"):
        read_table(tmp_path / "flags.parquet", ["a", "b"])
    with pytest.raises(DataError, match="row 1, column 'c': 'x' is not a number"):
        read_table(tmp_path / "flags.parquet", ["c"])
    parquet.write_table(arrow.table({"a": arrow.array([], arrow.int64())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="0 rows and 1 columns"):
        read_table(tmp_path / "empty.parquet", ["a"])
    with pytest.raises(DataError, match="not a readable Parquet"):
        read_table(write("no parquet", "bad.parquet"), ["a"])


# --- npz and folders


def test_npz_tables_and_images(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, inputs=np.arange(20.0).reshape(10, 2), targets=np.arange(10) % 2)
    data = load(path, test=0.3)
    assert data.kind == "table" and data.classes == ("0", "1") and (len(data.train), len(data.test)) == (7, 3)
    assert load(path, task="regression").task == "regression"
    np.savez(path, inputs=np.zeros((4, 5, 6), np.uint8), targets=np.array([0, 1, 2, 1]), classes=["a", "b", "c"],
             test_inputs=np.ones((1, 5, 6), np.uint8), test_targets=np.array([2]))  # fmt: skip
    data = load(path)
    assert data.kind == "image" and data.shape == (1, 5, 6) and data.classes == ("a", "b", "c")
    assert len(data.test) == 1 and data.test.inputs.min() == 1
    np.savez(path, inputs=np.zeros((4, 2)), targets=np.array([0.5, 1, 2, 1]))
    assert load(path).outputs == ("y1",)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": np.zeros((2, 2))}, "no array 'targets'"),
        ({"inputs": np.zeros((2, 2)), "targets": np.zeros(3)}, "2 inputs and 3 targets"),
        ({"inputs": np.zeros((0, 2)), "targets": np.zeros(0)}, "at least one"),
        ({"inputs": np.zeros((2, 2, 2)), "targets": np.zeros(2)}, "give uint8"),
        ({"inputs": np.array([[1, np.nan], [np.inf, 2]]), "targets": np.zeros(2)}, "2 values are NaN.*row 1, column 2"),
        ({"inputs": np.zeros((2, 2)), "targets": np.array([-1, 0])}, "from 0 on"),
        ({"inputs": np.array([["a"], ["b"]]), "targets": np.zeros(2)}, "give numbers"),
        ({"inputs": np.array([[{}], [{}]]), "targets": np.zeros(2)}, "not a readable"),
        ({"inputs": np.zeros((4, 2)), "targets": np.array([0, 5, 0, 5]), "classes": np.array(["a"])}, "label 5"),
        ({"inputs": np.zeros((4, 2)), "targets": np.array([0, 1, 0, 1]), "test_inputs": np.zeros((1, 3)),
          "test_targets": np.array([0])}, "another shape"),
    ],
)  # fmt: skip
def test_odd_npz(tmp_path, arrays, message):
    path = tmp_path / "odd.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        load(path, test=0.5)


def save(path, value, size=(6, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_fractions_of_npz(tmp_path):
    np.savez(tmp_path / "own.npz", inputs=np.zeros((4, 2)), targets=np.zeros(4))
    assert len(load(tmp_path / "own.npz", test="0.5").test) == 2
    with pytest.raises(DataError, match=r"test=1\.5"):
        load(tmp_path / "own.npz", test=1.5)
    with pytest.raises(DataError, match=r"test='other\.npz'"):
        load(tmp_path / "own.npz", test="other.npz")
    np.savez(tmp_path / "own.npz", inputs=3, targets=4)
    with pytest.raises(DataError, match="single numbers"):
        load(tmp_path / "own.npz")


def test_a_folder_of_images(tmp_path):
    for number in range(4):
        save(tmp_path / "flat" / "b" / f"{number}.png", (number, 0, 0))
        save(tmp_path / "flat" / "a" / f"{number}.png", (0, number, 0))
    data = load(tmp_path / "flat", test=0.25)
    assert (
        data.classes == ("a", "b") and data.shape == (3, 4, 6) and (len(data.train), len(data.test)) == (6, 2)
    )
    assert data.test.targets.tolist() == [0, 1]
    assert load(str(tmp_path / "flat"), size=3).shape == (3, 3, 3)
    for part in ("train", "val"):
        save(tmp_path / "two" / part / "x" / "1.png", 9, mode="L")
    save(tmp_path / "two" / "train" / "y" / "1.png", 7, mode="L")
    data = load("two", root=tmp_path)
    assert data.shape == (1, 4, 6) and len(data.train) == 2 and data.test.targets.tolist() == [0]
    save(tmp_path / "two" / "train" / "y" / "2.png", 7, size=(9, 9), mode="L")
    with pytest.raises(DataError, match=r"2\.png is \[1, 9, 9\], others are \[1, 4, 6\]: give size="):
        load(tmp_path / "two")


def test_paths_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"no such file or folder \(looked in .* and .*\)"):
        load("nowhere/data.csv", root=tmp_path, target="y")
    (tmp_path / "data.xyz").write_text("?")
    with pytest.raises(DataError, match=r"a \.xyz; give a"):
        load(tmp_path / "data.xyz")
    with pytest.raises(DataError, match="no option 'targt'; it has target, columns"):
        (tmp_path / "data.csv").write_text(ROWS)
        load(tmp_path / "data.csv", targt="kind")


# --- inputs to predict on

IMAGE = {"kind": "image", "shape": [3, 4, 6], "features": []}
TABLE = {"kind": "table", "shape": [2], "features": ["age", "height"]}


def test_inputs_of_images(tmp_path):
    save(tmp_path / "b.png", (1, 2, 3))
    save(tmp_path / "a.png", (4, 5, 6))
    (tmp_path / "notes.txt").write_text("not an image")
    inputs, names = read_inputs(tmp_path, IMAGE)
    assert (
        names == ("a.png", "b.png")
        and inputs.shape == (2, 3, 4, 6)
        and inputs[0, :, 0, 0].tolist() == [4, 5, 6]
    )
    single, names = read_inputs(tmp_path / "b.png", IMAGE)
    assert torch.equal(single[0], inputs[1]) and names == ("b.png",)
    with pytest.raises(
        DataError, match=r"3 × 4 × 6 \(channels × height × width\), the model wants 1 × 8 × 8"
    ):
        read_inputs(tmp_path / "b.png", load("digits"))
    (tmp_path / "c.png").write_bytes((tmp_path / "b.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"c\.png: damaged or not an image"):
        read_inputs(tmp_path, IMAGE)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no images"):
        read_inputs(tmp_path / "none", IMAGE)


def test_inputs_of_arrays(tmp_path):
    path = tmp_path / "in.npz"
    for key in ("inputs", "images"):
        np.savez(path, **{key: np.full((2, 3, 4, 6), 7, np.uint8)})
        assert read_inputs(path, IMAGE)[0].shape == (2, 3, 4, 6)
    np.savez(path, images=np.zeros((2, 8, 8), np.uint8))
    assert read_inputs(path, load("digits"))[0].shape == (2, 1, 8, 8)
    np.savez(path, inputs=np.array([[1, 2]]))
    values, names = read_inputs(path, TABLE)
    assert values.tolist() == [[1.0, 2.0]] and names == ("1",)
    cases = [
        (
            {"inputs": np.zeros((2, 3, 5, 6), np.uint8)},
            IMAGE,
            r"\[2, 3, 5, 6\], the model wants \[N, 3, 4, 6\]",
        ),
        ({"inputs": np.zeros((2, 3, 4, 6))}, IMAGE, "give images as uint8"),
        ({"inputs": np.zeros((0, 2))}, TABLE, "no rows"),
        ({"inputs": np.array([[1, np.nan]])}, TABLE, "row 1, column 2"),
        ({"other": np.zeros(2)}, TABLE, "no array 'inputs' or 'images'; it has other"),
    ]
    for arrays, facts, message in cases:
        np.savez(path, **arrays)
        with pytest.raises(DataError, match=message):
            read_inputs(path, facts)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="not a readable"):
        read_inputs(path, TABLE)


def test_inputs_of_tables(write, tmp_path):
    values, names = read_inputs(write(ROWS), TABLE)
    assert values.shape == (5, 2) and names == ("1", "2", "3", "4", "5")
    with pytest.raises(DataError, match="no column 'age'"):
        read_inputs(write("ag,height\n1,2\n"), TABLE)
    with pytest.raises(DataError, match="is a folder"):
        read_inputs(tmp_path, TABLE)
    with pytest.raises(DataError, match="no such file"):
        read_inputs(tmp_path / "no.csv", TABLE)
