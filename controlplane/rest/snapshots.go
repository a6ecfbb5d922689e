package rest

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/api/id"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

// keepSnapshot keeps the present state of a sandbox, which is not disturbed, under an id and, if asked for, a name.
func (a *API) keepSnapshot(w http.ResponseWriter, r *http.Request) error {
	var req e2b.NewSnapshot
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	name, tag, err := newName(req.Name)
	if err != nil {
		return err
	}
	if name != "" {
		taken, err := a.isTemplate(r.Context(), name)
		if err != nil {
			return err
		}
		if taken {
			return apierr.New(apierr.BadRequest, "field \"name\": %q is a template's", name)
		}
	}
	row, sb, err := a.look(r)
	if err != nil {
		return err
	}
	kept := store.Snapshot{
		ID: id.NewSnapshot(), SandboxID: row.ID, TemplateID: sb.TemplateId, Name: name, Tag: tag, NodeID: row.NodeID, CreatedAt: time.Now(),
	}
	ctx, cancel := mustFinish(r)
	defer cancel()
	if err := a.store.InsertSnapshot(ctx, kept); err != nil { // before it exists: a crash leaves nothing unknown
		return err
	}
	_, err = a.node.SnapshotCreate(ctx, row.ID, kept.ID)
	if err == nil {
		err = a.store.SnapshotReady(ctx, kept.ID)
	}
	if err != nil {
		a.takeBackSnapshot(ctx, kept.ID)
		return err
	}
	reply.JSON(w, http.StatusCreated, e2b.Snapshot{SnapshotID: kept.ID, Names: namesOf(kept)})
	return nil
}

// takeBackSnapshot leaves nothing of a snapshot that could not be made. What it cannot remove now the sweep does.
func (a *API) takeBackSnapshot(ctx context.Context, snapshotID string) {
	if _, err := a.store.MarkSnapshotDeleted(ctx, snapshotID, time.Now()); err != nil {
		a.log.Error().Str("snapshot", snapshotID).Err(err).Msg("row of a failed snapshot left behind")
	}
	if err := a.node.SnapshotDelete(ctx, snapshotID); err != nil && !errors.Is(err, &apierr.Error{Code: apierr.NotFound}) {
		a.log.Warn().Str("snapshot", snapshotID).Err(err).Msg("failed snapshot not cleaned up yet")
	}
}

// listSnapshots answers one page, newest first.
func (a *API) listSnapshots(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	limit, err := parseLimit(q.Get("limit"), 100)
	if err != nil {
		return err
	}
	var after cursor
	if s := q.Get("nextToken"); s != "" {
		if after, err = parseCursor(s); err != nil {
			return err
		}
	}
	found, _, err := a.snapshots(r.Context(), q.Get("sandboxID"), q.Get("name"))
	if err != nil {
		return err
	}
	page, more := pageOf(found, after, limit)
	if more {
		last := page[len(page)-1]
		w.Header().Set("X-Next-Token", cursor{last.CreatedAt, last.ID, false}.String())
	}
	list := make([]e2b.Snapshot, len(page)) // never null
	for i, s := range page {
		list[i] = e2b.Snapshot{SnapshotID: s.ID, Names: namesOf(s)}
	}
	reply.JSON(w, http.StatusOK, list)
	return nil
}

// snapshots returns what should exist and its node has, newest first, by two filters that may be empty.
func (a *API) snapshots(ctx context.Context, sandboxID, ref string) ([]store.Snapshot, map[string]*agentpb.Snapshot, error) {
	kept, err := a.node.Snapshots(ctx)
	if err != nil {
		return nil, nil, err
	}
	ways := []store.SnapshotFilter{{}}
	if ref != "" {
		ways = filters(ref, "")
	}
	for _, f := range ways {
		f.SandboxID = sandboxID
		rows, err := a.store.Snapshots(ctx, f)
		if err != nil {
			return nil, nil, err
		}
		rows = slices.DeleteFunc(rows, func(s store.Snapshot) bool { return kept[s.ID] == nil })
		if len(rows) > 0 {
			return rows, kept, nil
		}
	}
	return nil, kept, nil
}

// pageOf cuts what comes after a cursor to the limit; more says that something is left.
func pageOf(found []store.Snapshot, after cursor, limit int) (page []store.Snapshot, more bool) {
	if !after.zero() {
		from := slices.IndexFunc(found, func(s store.Snapshot) bool {
			return cmp.Or(after.startedAt.Compare(s.CreatedAt), strings.Compare(s.ID, after.id)) > 0
		})
		if from < 0 {
			return nil, false
		}
		found = found[from:]
	}
	return found[:min(limit, len(found))], len(found) > limit
}

// snapshot finds the one a reference means: an id, or a name whose tag is the default one if none is given.
func (a *API) snapshot(ctx context.Context, ref string) (store.Snapshot, error) {
	for _, f := range filters(ref, defaultTag) {
		rows, err := a.store.Snapshots(ctx, f)
		if err != nil {
			return store.Snapshot{}, err
		}
		if len(rows) > 0 {
			return rows[0], nil
		}
	}
	return store.Snapshot{}, noSnapshot(ref)
}

func noSnapshot(ref string) error { return apierr.New(apierr.NotFound, "snapshot %q not found", ref) }

// removeTemplate deletes a snapshot, which E2B's clients do as if it were a template. What was made from it is not touched.
func (a *API) removeTemplate(w http.ResponseWriter, r *http.Request) error {
	ref := r.PathValue("templateID")
	isTemplate, err := a.isTemplate(r.Context(), ref)
	if err != nil {
		return err
	}
	if isTemplate {
		return apierr.New(apierr.NotImplemented, "%q is a template of this host; this version of Torpor deletes only snapshots", ref)
	}
	row, err := a.snapshot(r.Context(), ref)
	if err != nil {
		return err
	}
	ctx, cancel := mustFinish(r)
	defer cancel()
	err = a.node.SnapshotDelete(ctx, row.ID)
	gone := errors.Is(err, &apierr.Error{Code: apierr.NotFound}) // another DELETE, most likely
	if err != nil && !gone {
		return err
	}
	first, err := a.store.MarkSnapshotDeleted(ctx, row.ID, time.Now())
	if err != nil {
		return err
	}
	if !first || gone {
		return noSnapshot(ref)
	}
	reply.NoContent(w)
	return nil
}

// source is what a sandbox is made from.
type source struct {
	templateID string // what it is said to be made from
	snapshotID string // empty: the template itself
}

// origin finds what a create names: a template, or a snapshot by its id or name. Both are unknown in the same words.
func (a *API) origin(ctx context.Context, ref string) (source, error) {
	isTemplate, err := a.isTemplate(ctx, ref)
	if err != nil {
		return source{}, err
	}
	if isTemplate {
		return source{templateID: ref}, nil
	}
	row, err := a.snapshot(ctx, ref)
	if errors.Is(err, &apierr.Error{Code: apierr.NotFound}) {
		err = apierr.New(apierr.NotFound, "template %q not found", ref)
	}
	return source{templateID: row.ID, snapshotID: row.ID}, err
}

func (a *API) isTemplate(ctx context.Context, ref string) (bool, error) {
	templates, err := a.node.Templates(ctx)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(templates, func(t *agentpb.Template) bool { return t.TemplateId == ref }), nil
}
