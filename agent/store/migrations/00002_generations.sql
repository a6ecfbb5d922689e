-- +goose Up
ALTER TABLE sandboxes ADD COLUMN next_generation INTEGER NOT NULL DEFAULT 0; -- number of the next one, never reused
ALTER TABLE sandboxes ADD COLUMN base INTEGER NOT NULL DEFAULT 0;            -- generation the VM was restored from, 0 = none
ALTER TABLE sandboxes ADD COLUMN booted INTEGER NOT NULL DEFAULT 0;          -- the VM was booted, not restored
ALTER TABLE sandboxes ADD COLUMN resume_mode TEXT NOT NULL DEFAULT 'none';   -- none | frozen | memory | previous | cold
UPDATE sandboxes SET next_generation = generation + 1;

-- +goose Down
ALTER TABLE sandboxes DROP COLUMN resume_mode;
ALTER TABLE sandboxes DROP COLUMN booted;
ALTER TABLE sandboxes DROP COLUMN base;
ALTER TABLE sandboxes DROP COLUMN next_generation;
