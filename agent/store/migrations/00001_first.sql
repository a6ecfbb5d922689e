-- +goose Up
CREATE TABLE sandboxes (
    id              TEXT PRIMARY KEY,
    template_id     TEXT NOT NULL,
    template_digest TEXT NOT NULL,
    token           TEXT NOT NULL,
    env             TEXT NOT NULL,            -- JSON object
    on_timeout      TEXT NOT NULL,            -- kill | pause
    auto_resume     INTEGER NOT NULL,
    timeout_seconds INTEGER NOT NULL,
    vcpus           INTEGER NOT NULL,
    memory_bytes    INTEGER NOT NULL,
    disk_bytes      INTEGER NOT NULL,
    state           TEXT NOT NULL,
    reason          TEXT NOT NULL,
    since           INTEGER NOT NULL,         -- times are unix milliseconds, 0 = none
    created_at      INTEGER NOT NULL,
    started_at      INTEGER NOT NULL,
    end_at          INTEGER NOT NULL,
    removed_at      INTEGER NOT NULL DEFAULT 0,
    incarnation     INTEGER NOT NULL,
    generation      INTEGER NOT NULL,
    layers          TEXT NOT NULL,            -- JSON array of file names, oldest first
    next_layer      INTEGER NOT NULL,
    envd_version    TEXT NOT NULL DEFAULT '',
    proc_pid        INTEGER NOT NULL DEFAULT 0,
    proc_start      INTEGER NOT NULL DEFAULT 0,
    proc_boot       TEXT NOT NULL DEFAULT ''
) STRICT;

-- Events are kept after the sandbox's end: no foreign key.
CREATE TABLE events (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox_id  TEXT NOT NULL,
    at          INTEGER NOT NULL,
    type        TEXT NOT NULL,                -- vm | envd
    from_state  TEXT NOT NULL,
    to_state    TEXT NOT NULL,
    reason      TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    phases      TEXT NOT NULL                 -- JSON object, milliseconds
) STRICT;
CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);

CREATE TABLE templates (
    id         TEXT PRIMARY KEY,
    digest     TEXT NOT NULL,
    state      TEXT NOT NULL,                 -- ready | failed
    error      TEXT NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT;

-- +goose Down
DROP TABLE templates;
DROP TABLE events;
DROP TABLE sandboxes;
