"""Reads rows as conversations.

`formats` detects the row format and returns a column mapping; `rows.RowReader` turns the bytes of a row into
`Conversation` records according to it, or raises RowError; `adapt` converts a conversation to the form that a chat
template accepts. Nothing is dropped silently: parts of a row that aren't used are recorded as `Note`s.
"""
