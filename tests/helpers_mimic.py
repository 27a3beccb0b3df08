"""A small made-up copy of MIMIC-III's tables, with what goes wrong in real ones."""

import csv
import gzip
import random
from datetime import datetime, timedelta

HEADERS = {
    "PATIENTS": "ROW_ID,SUBJECT_ID,GENDER,DOB,DOD,DOD_HOSP,DOD_SSN,EXPIRE_FLAG",
    "ADMISSIONS": "ROW_ID,SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME,DEATHTIME,ADMISSION_TYPE,ADMISSION_LOCATION,"
    "DISCHARGE_LOCATION,INSURANCE,LANGUAGE,RELIGION,MARITAL_STATUS,ETHNICITY,EDREGTIME,EDOUTTIME,DIAGNOSIS,"
    "HOSPITAL_EXPIRE_FLAG,HAS_CHARTEVENTS_DATA",
    "ICUSTAYS": "ROW_ID,SUBJECT_ID,HADM_ID,ICUSTAY_ID,DBSOURCE,FIRST_CAREUNIT,LAST_CAREUNIT,FIRST_WARDID,"
    "LAST_WARDID,INTIME,OUTTIME,LOS",
    "CHARTEVENTS": "ROW_ID,SUBJECT_ID,HADM_ID,ICUSTAY_ID,ITEMID,CHARTTIME,STORETIME,CGID,VALUE,VALUENUM,VALUEUOM,"
    "WARNING,ERROR,RESULTSTATUS,STOPPED",
    "LABEVENTS": "ROW_ID,SUBJECT_ID,HADM_ID,ITEMID,CHARTTIME,VALUE,VALUENUM,VALUEUOM,FLAG",
    "INPUTEVENTS_CV": "ROW_ID,SUBJECT_ID,HADM_ID,ICUSTAY_ID,CHARTTIME,ITEMID,AMOUNT,AMOUNTUOM,RATE,RATEUOM",
    "INPUTEVENTS_MV": "ROW_ID,SUBJECT_ID,HADM_ID,ICUSTAY_ID,STARTTIME,ENDTIME,ITEMID,AMOUNT,AMOUNTUOM,"
    "STATUSDESCRIPTION",
    "OUTPUTEVENTS": "ROW_ID,SUBJECT_ID,HADM_ID,ICUSTAY_ID,CHARTTIME,ITEMID,VALUE,VALUEUOM,STORETIME,CGID,STOPPED,"
    "NEWBOTTLE,ISERROR",
    "PROCEDUREEVENTS_MV": "ROW_ID,SUBJECT_ID,HADM_ID,ICUSTAY_ID,STARTTIME,ENDTIME,ITEMID,VALUE,VALUEUOM,"
    "STATUSDESCRIPTION",
    "PRESCRIPTIONS": "ROW_ID,SUBJECT_ID,HADM_ID,ICUSTAY_ID,STARTDATE,ENDDATE,DRUG_TYPE,DRUG,DOSE_VAL_RX",
}
GZIPPED = ("CHARTEVENTS", "PATIENTS", "PRESCRIPTIONS")
DRUGS = ("Aspirin", "Potassium Chloride, 20 mEq", 'Insulin "Humalog"')


def make_tables(patients=60, seed=0):
    """Rows of every table as dicts of text, in random order."""
    rng = random.Random(seed)
    tables = {name: [] for name in HEADERS}
    for subject in rng.sample(range(100, 100 + 10 * patients), patients):
        _add_patient(tables, subject, rng)
    stranger = {"SUBJECT_ID": "5", "CHARTTIME": "2150-01-01 00:00:00", "ITEMID": "220045", "VALUENUM": "70"}
    tables["CHARTEVENTS"].append(stranger)  # of a patient without admissions
    for rows in tables.values():
        rng.shuffle(rows)
    return tables


def _add_patient(tables, subject, rng):
    start = datetime(2100, 1, 1) + timedelta(days=rng.randrange(30_000), seconds=rng.randrange(86_400))
    years = rng.choice([0, 25, 60, 88, 300])
    birth = start - timedelta(days=round(365.25 * years))
    tables["PATIENTS"].append(
        {"SUBJECT_ID": str(subject), "GENDER": rng.choice("FM"), "DOB": f"{birth:%Y-%m-%d} 00:00:00"}
    )
    for number in range(rng.choice([1, 1, 2, 3])):
        admission = subject * 10 + number
        length = timedelta(hours=rng.choice([5, 24, 30, 80, 200]))
        dies = number == 2 or rng.random() < 0.2
        row = {
            "SUBJECT_ID": str(subject), "HADM_ID": str(admission), "ADMITTIME": str(start),
            "DISCHTIME": str(start + length), "DEATHTIME": str(start + length) if dies else "",
            "ADMISSION_TYPE": rng.choice(["EMERGENCY", "ELECTIVE", "URGENT", "NEWBORN"]),
            "HOSPITAL_EXPIRE_FLAG": str(int(dies)), "DIAGNOSIS": 'CHEST PAIN, "ACUTE"',
        }  # fmt: skip
        tables["ADMISSIONS"].append(row)
        if rng.random() < 0.1:
            tables["ADMISSIONS"].append(dict(row))  # listed twice
        if rng.random() < 0.9:
            _add_events(tables, str(subject), str(admission), start, length, rng)
        start += length + timedelta(days=rng.choice([1, 40, 400]))


def _add_events(tables, subject, admission, start, length, rng):
    def row(table, column, **cells):
        when = start + rng.random() * length * 1.1 - timedelta(hours=1)
        when = when.replace(microsecond=0, second=0)
        cells = {"SUBJECT_ID": subject, "HADM_ID": admission, column: str(when), **cells}
        tables[table].append(cells)
        if rng.random() < 0.1:
            tables[table].append(dict(cells))

    def value(mean):
        return rng.choice(["", f"{rng.gauss(mean, mean / 5):.1f}", f"{mean}"])

    for _ in range(rng.randrange(5, 40)):
        item = rng.choice(["220045", "220179", "223761", "", str(900_000 + int(subject) % 40)])
        row("CHARTEVENTS", "CHARTTIME", ITEMID=item, VALUENUM=value(80), ERROR=rng.choice(["", "0", "1"]))
        row("LABEVENTS", "CHARTTIME", ITEMID=rng.choice(["50912", "50931"]), VALUENUM=value(5))
    for _ in range(rng.randrange(6)):
        row("LABEVENTS", "CHARTTIME", ITEMID="50912", VALUENUM="1.5", CHARTTIME="", HADM_ID="")
        row("INPUTEVENTS_CV", "CHARTTIME", ITEMID="30018", AMOUNT=value(100))
        status = rng.choice(["FinishedRunning", "Rewritten", "Stopped"])
        row("INPUTEVENTS_MV", "STARTTIME", ITEMID="225158", AMOUNT=value(50), STATUSDESCRIPTION=status)
        row("OUTPUTEVENTS", "CHARTTIME", ITEMID="40055", VALUE=value(200), ISERROR=rng.choice(["", "1"]))
        row("PROCEDUREEVENTS_MV", "STARTTIME", ITEMID="225792", STATUSDESCRIPTION=status)
        day = start + timedelta(days=rng.randrange(3))
        row("PRESCRIPTIONS", "STARTDATE", DRUG=rng.choice(DRUGS), STARTDATE=f"{day:%Y-%m-%d} 00:00:00")
    for _ in range(rng.randrange(1, 4)):
        row("ICUSTAYS", "INTIME", FIRST_CAREUNIT=rng.choice(["MICU", "SICU"]))


def write_tables(folder, tables, gzipped=GZIPPED, newline="\n", lower=False):
    """The tables as CSV files, some of them gzipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        columns = HEADERS[name].split(",")
        file_name = (name.lower() if lower else name) + ".csv" + (".gz" if name in gzipped else "")
        opened = gzip.open if name in gzipped else open
        with opened(folder / file_name, "wt", newline="") as file:
            writer = csv.writer(file, lineterminator=newline)
            writer.writerow([column.lower() for column in columns] if lower else columns)
            for number, row in enumerate(rows):
                writer.writerow(
                    [row.get(column, str(number) if column == "ROW_ID" else "") for column in columns]
                )
    return folder
