"""Prepares one slice: reads its rows, renders, encodes and checks them, and commits the shard.

`job.SliceJob` takes a slice and returns a function that commits its shard and returns a `SliceReport`;
`pipeline.Pipeline` holds the stages and turns rows into a shard's columns. Every row ends as examples or as a rejected
row with its reason. The result depends on the recipe and the rows alone, never on the process or the batch size.
"""
