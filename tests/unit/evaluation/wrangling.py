"""Small folders of data wrangling tasks, in fm_data_tasks' layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_PAIRS = "ltable_id,rtable_id,label\n"
BEER = {
    "tableA.csv": 'id,Beer_Name,Brew_Factory_Name,Style,year\n0,Red Ale,"Big, '
    'Brewing",x,2003\n1,Stout, Small ,y,07\n',
    "tableB.csv": "id,Beer_Name,Brew_Factory_Name,Style,year\n0,Red "
    "ale,,x,2003\n1,Porter,Other,z,\n",
    "train.csv": _PAIRS + "0,0,1\n0,1,0\n1,0,0\n1,1,0\n",
    "valid.csv": _PAIRS + "0,0,1\n1,1,0\n",
    "test.csv": _PAIRS + "0,1,0\n",
}
_CELLS = "row_id,col_name,is_clean\n"
HOSPITAL = {
    "table.csv": "City,Phone\nbirmxngham,2053258100\nboaz,2055938310\n",
    "train.csv": _CELLS + "1,City,1\n0,Phone,1\n0,City,0\n",
    "valid.csv": _CELLS + "0,City,0\n",
    "test.csv": _CELLS + "0,City,0\n0,Phone,1\n",
}
RESTAURANT = {
    "train.csv": "name,addr,city,type\na,b,denver,grill\nc,d,new york,bar\n",
    "valid.csv": "name,addr,city,type\nritz,160 e. 64th st.,new york,\n",
    "test.csv": "name,addr,city,type\nx,y,denver,z\n",
}


def write_folder(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder
