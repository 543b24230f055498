/* Mapped files with weights. See mappings.c. */
#ifndef FLEETFOOT_MAPPINGS_H
#define FLEETFOOT_MAPPINGS_H

/* Whether a guarded file has fewer bytes than are mapped. */
__attribute__((visibility("default"))) int ff_file_was_cut(void);

#endif
