-- +goose Up
-- Times are unix milliseconds. Rows are never removed: what a deleted snapshot still has on its node is found by its row.
CREATE TABLE snapshots (
    id          TEXT    NOT NULL PRIMARY KEY,
    sandbox_id  TEXT    NOT NULL,            -- whose state it is
    template_id TEXT    NOT NULL,            -- of that sandbox
    name        TEXT    NOT NULL DEFAULT '', -- empty: it has only its id
    tag         TEXT    NOT NULL DEFAULT '',
    node_id     TEXT    NOT NULL,
    created_at  INTEGER NOT NULL,
    ready       INTEGER NOT NULL DEFAULT 0,  -- 1 when its node has it
    deleted_at  INTEGER NOT NULL DEFAULT 0
) STRICT;
-- A name with its tag means one snapshot.
CREATE UNIQUE INDEX snapshots_name ON snapshots (name, tag) WHERE name <> '' AND ready = 1 AND deleted_at = 0;
CREATE INDEX snapshots_sandbox ON snapshots (sandbox_id) WHERE deleted_at = 0;

-- +goose Down
DROP TABLE snapshots;
