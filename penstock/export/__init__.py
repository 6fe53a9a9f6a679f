"""A prepared dataset in the formats of other trainers, written once, resumed after any kill.

`export` runs an export; `formats/` holds one file per format; a new file there is a new format.
"""
