-- +goose Up
-- Times are unix milliseconds. Rows are never removed: a deleted sandbox keeps its id, so that its events stay readable.
CREATE TABLE sandboxes (
    id           TEXT    NOT NULL PRIMARY KEY,
    template_id  TEXT    NOT NULL,
    metadata     TEXT    NOT NULL, -- JSON object of strings
    user_id      TEXT    NOT NULL DEFAULT '',
    access_token TEXT    NOT NULL, -- empty: not secured
    token_hash   BLOB    NOT NULL, -- SHA-256 of access_token, to find a sandbox by its token
    node_id      TEXT    NOT NULL,
    created_at   INTEGER NOT NULL,
    deleted_at   INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX sandboxes_token ON sandboxes (token_hash) WHERE deleted_at = 0;
CREATE INDEX sandboxes_user ON sandboxes (user_id) WHERE deleted_at = 0;

CREATE TABLE api_keys (
    hash       BLOB    NOT NULL PRIMARY KEY, -- SHA-256 of the key
    name       TEXT    NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

-- +goose Down
DROP TABLE api_keys;
DROP TABLE sandboxes;
